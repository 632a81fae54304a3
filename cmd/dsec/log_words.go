package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"
)

// Records have times as nanoseconds, which hashes are over. These are the names
// that they lie under, in the requests and answers of docs/formats/trajectory.md.
var (
	recordedSpans = map[string]bool{"TTL": true, "Idle": true, "ttl": true, "idle": true, "timeout": true, "lasted": true, "cpu": true}
	recordedTimes = map[string]bool{"started": true, "ended": true}
	// Their members have names that a user chose.
	recordedMaps = map[string]bool{"Labels": true, "labels": true, "Env": true, "env": true}
)

// inWords gives a recorded request or answer as other output has it: names in
// camelCase, durations as seconds, times in RFC 3339. What is no JSON stays.
func inWords(b json.RawMessage) any {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	v, err := wordsOf(d, "", false)
	if err != nil {
		return b
	}
	return v
}

// wordsOf reads one value, that of a member called name. The names in what is
// the user's own stay.
func wordsOf(d *json.Decoder, name string, own bool) (any, error) {
	t, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch v := t.(type) {
	case json.Delim:
		if v == '[' {
			list := []any{}
			for d.More() {
				item, err := wordsOf(d, "", own)
				if err != nil {
					return nil, err
				}
				list = append(list, item)
			}
			_, err := d.Token()
			return list, err
		}
		o := object{}
		for d.More() {
			k, err := d.Token()
			if err != nil {
				return nil, err
			}
			key := fmt.Sprint(k)
			value, err := wordsOf(d, key, own || recordedMaps[key])
			if err != nil {
				return nil, err
			}
			if !own {
				key = fieldName(key)
			}
			o = append(o, member{key, value})
		}
		_, err := d.Token()
		return o, err
	case json.Number:
		n, err := v.Int64()
		switch {
		case own || err != nil:
		case recordedSpans[name]:
			return time.Duration(n).Seconds(), nil
		case recordedTimes[name]:
			return time.Unix(0, n).UTC().Format(time.RFC3339Nano), nil
		}
	}
	return t, nil
}
