package main

import "testing"

func TestPixel(t *testing.T) {
	for text, ok := range map[string]bool{"1,2": true, "0,0": true, "": false, "1": false, "1,2,3": false, "-1,2": false, "1,x": false, "1, 2x": false} {
		var p pixel
		if err := p.UnmarshalText([]byte(text)); ok != (err == nil) {
			t.Errorf("%q: %+v, %v", text, p, err)
		}
	}
}
