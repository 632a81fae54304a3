package main

import (
	"encoding/json"
	"testing"
)

// TestRecordsInWords: what a record holds is printed as everything else is, and
// what a user named stays as it was named.
func TestRecordsInWords(t *testing.T) {
	for in, want := range map[string]string{
		`{"Spec":{"TTL":3600000000000,"Resources":{"CPU":2},"Env":{"TTL":"1","Idle":"x"},"Labels":{"CPU":"y"}},"Layers":["a"]}`: `{"spec":{"ttl":3600,"resources":{"cpu":2},"env":{"TTL":"1","Idle":"x"},"labels":{"CPU":"y"}},"layers":["a"]}`,
		`{"id":"c1","started":1796127018510967937,"cpu":1677000,"maxrss":4984832,"stdout":{"Total":3}}`:                         `{"id":"c1","started":"2026-12-01T12:10:18.510967937Z","cpu":0.001677,"maxRss":4984832,"stdout":{"total":3}}`,
		`{"argv":["a",{"base64":"/w=="}],"timeout":1500000000,"env":["TTL=5"]}`:                                                 `{"argv":["a",{"base64":"/w=="}],"timeout":1.5,"env":["TTL=5"]}`,
		`{"size":18446744073709551615,"ended":0}`:                                                                               `{"size":18446744073709551615,"ended":"1970-01-01T00:00:00Z"}`,
		`null`: `null`,
		`[]`:   `[]`,
	} {
		got, err := json.Marshal(inWords(json.RawMessage(in)))
		if err != nil || string(got) != want {
			t.Errorf("%s\nis   %s, %v\nwant %s", in, got, err, want)
		}
	}
}
