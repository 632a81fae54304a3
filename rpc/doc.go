// Package rpc carries the contracts of package dsec over HTTP: the types of the
// wire, their translation, and the server side. It speaks the Connect protocol
// in JSON and binary, gRPC and gRPC-Web, over HTTP/1.1 and 2. Package client is
// the other side.
//
// What it does not do: it checks no tokens (package api does), decides nothing
// and keeps nothing, save open port connections and which project a sandbox is
// of.
//
// # Calling it by hand
//
// A call is a POST of JSON to /dsec.v1.SERVICE/METHOD. The sandbox is named by
// a header, never in the body, and so are the key and the step that make a call
// repeatable:
//
//	curl -H "Authorization: Bearer $DSEC_TOKEN" -H 'Content-Type: application/json' \
//	  -H 'Dsec-Key: task-17' \
//	  -d '{"spec":{"environment":{"base":"debian"},"ttl":"600s"}}' \
//	  $DSEC_URL/dsec.v1.Sandboxes/Create
//
//	curl ... -H 'Dsec-Sandbox: sb...' -H 'Dsec-Step: session-1:4' \
//	  -d '{"command":{"shell":"echo hello; exit 3"}}' $DSEC_URL/dsec.v1.Commands/Run
//	{"status":{"id":"c1","outcome":"exited","code":3,...},"stdout":"aGVsbG8K"}
//
// Durations are "1.5s", times RFC 3339, bytes base64, and 64-bit numbers are
// strings in answers (both forms are accepted). Fields that are zero are left
// out, except the code of an ended command.
//
// A failed call has a status other than 200 and a body
//
//	{"code":"failed_precondition","message":"...","details":[...]}
//
// The header Dsec-Request of every answer names the request in the logs.
//
// A streaming call has Content-Type application/connect+json, and its messages,
// in both directions, are a byte of flags, four bytes of length (big endian) and
// JSON. The last message of an answer has flag 2: {} or {"error":{...}}.
//
// # Names
//
// Paths, arguments and variables can be any bytes. A field such as "path" is
// always readable; where the name is not UTF-8 its twin "path_bytes" has it
// exactly, and wins. Labels, keys of image names and user names are UTF-8.
//
// Invariants:
//   - ErrorKind and RPC code map one to one, in code.go only.
//   - The text of an Internal error is logged here, once, and never sent.
//   - A stream ends with exactly one end message, after the last byte.
//   - A context that carries a dsec.Caller sees its project's sandboxes only.
//
// Read next: rpc/proto/dsec/v1, then packages client and api.
package rpc
