//go:build tools

// Names the server with GridFS that tests run against, so that go.mod and go.sum pin it and all that it is made of.
package tools

import _ "github.com/FerretDB/FerretDB/cmd/ferretdb"
