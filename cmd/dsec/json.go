package main

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"time"
	"unicode"
	"unicode/utf8"
)

// json prints v for programs: the fields of the domain types in camelCase,
// durations as seconds, times in RFC 3339 and left out when zero, lists never
// null. Fields added to a domain type appear by themselves.
func (a *app) json(v any) error {
	b, err := json.MarshalIndent(plain(reflect.ValueOf(v)), "", "  ")
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	_, err = a.Stdout.Write(append(b, '\n'))
	return err
}

var durationType = reflect.TypeFor[time.Duration]()

// plain gives v as maps, lists and scalars that package json prints well.
func plain(v reflect.Value) any {
	if !v.IsValid() {
		return nil
	}
	if t, ok := v.Interface().(time.Time); ok {
		return t.UTC().Format(time.RFC3339Nano)
	}
	if v.Type() == durationType {
		return time.Duration(v.Int()).Seconds()
	}
	if m, ok := v.Interface().(encoding.TextMarshaler); ok {
		return m
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			return nil
		}
		return plain(v.Elem())
	case reflect.Struct:
		return plainStruct(v)
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return plainBytes(v.Bytes())
		}
		list := make([]any, v.Len())
		for i := range list {
			list[i] = plain(v.Index(i))
		}
		return list
	case reflect.Map:
		m := make(map[string]any, v.Len())
		for it := v.MapRange(); it.Next(); {
			m[fmt.Sprint(it.Key())] = plain(it.Value())
		}
		return m
	}
	return v.Interface()
}

// plainBytes is text where it can be, base64 where it must.
func plainBytes(b []byte) any {
	if utf8.Valid(b) {
		return string(b)
	}
	return b
}

func plainStruct(v reflect.Value) any {
	var out object
	for i := range v.NumField() {
		f := v.Type().Field(i)
		switch {
		case !f.IsExported():
			continue
		case f.Anonymous:
			if inner, ok := plainStruct(v.Field(i)).(object); ok {
				out = append(out, inner...)
			}
			continue
		}
		if t, ok := v.Field(i).Interface().(time.Time); ok && t.IsZero() {
			continue
		}
		out = append(out, member{fieldName(f.Name), plain(v.Field(i))})
	}
	return out
}

// fieldName turns a Go name into camelCase: ID to id, OOMKills to oomKills.
func fieldName(name string) string {
	switch name {
	case "CPUs":
		return "cpus"
	case "MaxRSS", "maxrss":
		return "maxRss"
	}
	r := []rune(name)
	for i := range r {
		if !unicode.IsUpper(r[i]) || i > 0 && i+1 < len(r) && unicode.IsLower(r[i+1]) {
			break
		}
		r[i] = unicode.ToLower(r[i])
	}
	return string(r)
}

// object is a JSON object that keeps its order, that of the Go type.
type object []member

type member struct {
	name  string
	value any
}

// MarshalJSON writes the members in order.
func (o object) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, m := range o {
		if i > 0 {
			b = append(b, ',')
		}
		name, err := json.Marshal(m.name)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(m.value)
		if err != nil {
			return nil, err
		}
		b = append(append(append(b, name...), ':'), value...)
	}
	return append(b, '}'), nil
}
