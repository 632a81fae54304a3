package rpc

import (
	"context"
	"errors"
	"io"
	"strings"
	"unicode/utf8"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectproto"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

var (
	binaryCodec = connectproto.NewBinaryCodec()
	jsonCodec   = connectproto.NewJSONCodec()

	// strictJSON is what a server reads with: a field that it does not know
	// would ask for something that is then not done.
	strictJSON = func() *connectproto.JSONCodec {
		c := connectproto.NewJSONCodec()
		c.UnmarshalOptions.DiscardUnknown = false
		return c
	}()
)

// lenient is a codec of the server that does not fail on an answer with a text
// that is not UTF-8, such as a user name found in an image: it replaces the
// bytes at fault and tries again. Of requests it takes what its codec takes.
type lenient struct{ connect.StableCodec }

// MarshalWrite encodes msg.
func (c lenient) MarshalWrite(ctx context.Context, dst io.Writer, msg any) error {
	err := c.StableCodec.MarshalWrite(ctx, dst, msg)
	m, ok := msg.(proto.Message)
	if err == nil || !ok {
		return err
	}
	// A message is written whole or not at all, so nothing is written yet. The
	// clone keeps maps of the services' own records as they are.
	m = proto.Clone(m)
	scrub(m.ProtoReflect())
	return c.StableCodec.MarshalWrite(ctx, dst, m)
}

// UnmarshalRead decodes a request. What JSON is at fault for reads the same
// each time: its decoder begins with one of two spaces by turns.
func (c lenient) UnmarshalRead(ctx context.Context, src io.Reader, msg any) error {
	err := c.StableCodec.UnmarshalRead(ctx, src, msg)
	if err == nil || c.IsBinary() {
		return err
	}
	if text, ok := strings.CutPrefix(strings.ReplaceAll(err.Error(), "\u00a0", " "), "proto: "); ok {
		return errors.New("JSON: " + text)
	}
	return err
}

// scrub replaces invalid bytes in all texts of m.
func scrub(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			scrubMap(fd, v.Map())
		case fd.IsList():
			for i, list := 0, v.List(); i < list.Len(); i++ {
				if fd.Message() != nil {
					scrub(list.Get(i).Message())
				} else if x, ok := valid(fd, list.Get(i)); ok {
					list.Set(i, x)
				}
			}
		case fd.Message() != nil:
			scrub(v.Message())
		default:
			if x, ok := valid(fd, v); ok {
				m.Set(fd, x)
			}
		}
		return true
	})
}

func scrubMap(fd protoreflect.FieldDescriptor, m protoreflect.Map) {
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		if fd.MapValue().Message() != nil {
			scrub(v.Message())
			return true
		}
		key, odd := valid(fd.MapKey(), k.Value())
		val, oddValue := valid(fd.MapValue(), v)
		if odd {
			m.Clear(k)
		}
		if odd || oddValue {
			m.Set(key.MapKey(), val)
		}
		return true
	})
}

// valid gives v as UTF-8 and whether that is a change.
func valid(fd protoreflect.FieldDescriptor, v protoreflect.Value) (protoreflect.Value, bool) {
	if fd.Kind() != protoreflect.StringKind || utf8.ValidString(v.String()) {
		return v, false
	}
	return protoreflect.ValueOfString(strings.ToValidUTF8(v.String(), "\uFFFD")), true
}
