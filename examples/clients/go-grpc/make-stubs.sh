#!/bin/sh
# Makes the package `inference` from this project's protos, in the folder given or beside this file.
# Needs protoc, protoc-gen-go and protoc-gen-go-grpc: go install google.golang.org/protobuf/cmd/protoc-gen-go@latest and
# google.golang.org/grpc/cmd/protoc-gen-go-grpc@latest, or Debian's protobuf-compiler, golang-goprotobuf-dev and protoc-gen-go-grpc.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$here}/inference
package=example.org/dynamo-grpc-client/inference
flags="paths=source_relative,Mdynamo/protos/inference.proto=$package,Mdynamo/protos/model_config.proto=$package"
mkdir -p "$target"
cd "$here/../../../protos"
protoc "--go_out=$flags:$target" "--go-grpc_out=$flags:$target" dynamo/protos/inference.proto dynamo/protos/model_config.proto
mv "$target"/dynamo/protos/*.go "$target"
rmdir -p "$target/dynamo/protos" 2>/dev/null || true
