package qemu

import "strings"

// buttonNames are the buttons of a pointer.
var buttonNames = map[string]bool{"left": true, "middle": true, "right": true, "wheel-up": true, "wheel-down": true}

// keyNames are the keys that QEMU 7.2 knows, by its QKeyCode.
var keyNames = func() map[string]bool {
	m := map[string]bool{}
	for _, k := range strings.Fields(`
		shift shift_r alt alt_r ctrl ctrl_r menu esc 1 2 3 4 5 6 7 8 9 0 minus equal backspace tab
		q w e r t y u i o p bracket_left bracket_right ret a s d f g h j k l semicolon apostrophe grave_accent backslash
		z x c v b n m comma dot slash asterisk spc caps_lock f1 f2 f3 f4 f5 f6 f7 f8 f9 f10 num_lock scroll_lock
		kp_divide kp_multiply kp_subtract kp_add kp_enter kp_decimal sysrq kp_0 kp_1 kp_2 kp_3 kp_4 kp_5 kp_6 kp_7 kp_8 kp_9
		less f11 f12 print home pgup pgdn end left up down right insert delete stop again props undo front copy open paste
		find cut lf help meta_l meta_r compose pause ro hiragana henkan yen muhenkan katakanahiragana kp_comma kp_equals
		power sleep wake audionext audioprev audiostop audioplay audiomute volumeup volumedown mediaselect mail calculator
		computer ac_home ac_back ac_forward ac_refresh ac_bookmarks`) {
		m[k] = true
	}
	return m
}()

// plain and shifted are the characters of a US keyboard beside letters and
// digits, and the keys they are on.
var (
	plain = map[rune]string{
		' ': "spc", '\n': "ret", '\t': "tab", '\b': "backspace", '\x1b': "esc", '-': "minus", '=': "equal",
		'[': "bracket_left", ']': "bracket_right", ';': "semicolon", '\'': "apostrophe", '`': "grave_accent", '\\': "backslash",
		',': "comma", '.': "dot", '/': "slash",
	}
	shifted = map[rune]string{
		'_': "minus", '+': "equal", '{': "bracket_left", '}': "bracket_right", ':': "semicolon", '"': "apostrophe", '~': "grave_accent",
		'|': "backslash", '<': "comma", '>': "dot", '?': "slash",
		'!': "1", '@': "2", '#': "3", '$': "4", '%': "5", '^': "6", '&': "7", '*': "8", '(': "9", ')': "0",
	}
)

// typed gives the keys that write a character, nil for none.
func typed(r rune) []string {
	switch {
	case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
		return []string{string(r)}
	case r >= 'A' && r <= 'Z':
		return []string{"shift", string(r + 'a' - 'A')}
	case plain[r] != "":
		return []string{plain[r]}
	case shifted[r] != "":
		return []string{"shift", shifted[r]}
	}
	return nil
}
