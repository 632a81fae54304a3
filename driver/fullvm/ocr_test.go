package fullvm_test

import (
	"bytes"
	"image"
	"os"
	"strings"
	"testing"
)

// videoBIOS holds the letters of the display's text mode.
const videoBIOS = "/usr/share/seabios/vgabios-stdvga.bin"

// A cell of the text mode, in pixels. The ninth column of a letter is empty.
const cellWidth, cellHeight, glyphWidth = 9, 16, 8

type glyph [cellHeight]byte

// letters are the glyphs, found in the BIOS by that of the letter A.
var letters = func() map[glyph]rune {
	m := map[glyph]rune{}
	rom, err := os.ReadFile(videoBIOS)
	if err != nil {
		return m
	}
	a := []byte{0, 0, 0x10, 0x38, 0x6c, 0xc6, 0xc6, 0xfe, 0xc6, 0xc6, 0xc6, 0xc6, 0, 0, 0, 0}
	at := bytes.Index(rom, a) - 'A'*cellHeight
	if at < 0 {
		return m
	}
	for r := rune('~'); r >= ' '; r-- {
		m[glyph(rom[at+int(r)*cellHeight:][:cellHeight])] = r
	}
	return m
}()

// text reads what a picture of the text mode says, by lines without the spaces
// at their ends.
func text(img image.Image) []string {
	var out []string
	for y := 0; y+cellHeight <= img.Bounds().Dy(); y += cellHeight {
		var line strings.Builder
		for x := 0; x+cellWidth <= img.Bounds().Dx(); x += cellWidth {
			line.WriteRune(letter(img, x, y))
		}
		out = append(out, strings.TrimRight(line.String(), " "))
	}
	return out
}

func letter(img image.Image, x, y int) rune {
	var g glyph
	for row := range cellHeight {
		for col := range glyphWidth {
			if r, gr, b, _ := img.At(x+col, y+row).RGBA(); r+gr+b > 0x6000 {
				g[row] |= 0x80 >> col
			}
		}
	}
	if r, ok := letters[g]; ok {
		return r
	}
	for row := 13; row < cellHeight; row++ { // the cursor
		g[row] = 0
	}
	if r, ok := letters[g]; ok {
		return r
	}
	return '\ufffd'
}

func TestLettersAreKnown(t *testing.T) {
	if len(letters) < 90 {
		t.Fatalf("%s holds %d letters", videoBIOS, len(letters))
	}
}
