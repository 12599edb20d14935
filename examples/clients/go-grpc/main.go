// A client in Go over gRPC, with a pool of connections: runs a tensor model and a language model through KServe's protocol, many
// requests at once.
//
//	./make-stubs.sh
//	go run . -target 127.0.0.1:8001 -text smollm2 "Why is the sea salty?"
//	go run . -target 127.0.0.1:8001 -classify classifier -requests 100
//
// With an API key: DYNAMO_API_KEY=… go run . …
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	pb "example.org/dynamo-grpc-client/inference"
)

// Pool spreads calls over connections in turn. A connection carries as many calls at once as the server allows it
// (--grpc-max-concurrent-streams); several reach several frontends behind one address, and use several cores.
type Pool struct {
	connections []*grpc.ClientConn
	next        uint64
}

// NewPool opens connections in the background; the first calls wait for them.
func NewPool(target string, size int) (*Pool, error) {
	pool := &Pool{}
	for i := 0; i < size; i++ {
		connection, err := grpc.Dial(
			target,
			grpc.WithInsecure(),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.WaitForReady(true)),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		)
		if err != nil {
			pool.Close()
			return nil, err
		}
		pool.connections = append(pool.connections, connection)
	}
	return pool, nil
}

// Client is a stub on the next connection.
func (p *Pool) Client() pb.GRPCInferenceServiceClient {
	turn := atomic.AddUint64(&p.next, 1)
	return pb.NewGRPCInferenceServiceClient(p.connections[turn%uint64(len(p.connections))])
}

// Close ends all connections, and the calls on them.
func (p *Pool) Close() {
	for _, connection := range p.connections {
		connection.Close()
	}
}

// text makes a tensor of one string, which goes into RawInputContents as it is.
func text(name string) *pb.ModelInferRequest_InferInputTensor {
	return &pb.ModelInferRequest_InferInputTensor{Name: name, Datatype: "BYTES", Shape: []int64{1}}
}

// ask streams the response of a language model to onText.
func ask(ctx context.Context, client pb.GRPCInferenceServiceClient, model, prompt string, onText func(string)) error {
	stream, err := client.ModelStreamInfer(ctx)
	if err != nil {
		return err
	}
	request := &pb.ModelInferRequest{
		ModelName:        model,
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{text("text_input")},
		RawInputContents: [][]byte{[]byte(prompt)},
		Parameters: map[string]*pb.InferParameter{
			"streaming":  {ParameterChoice: &pb.InferParameter_BoolParam{BoolParam: true}},
			"max_tokens": {ParameterChoice: &pb.InferParameter_Int64Param{Int64Param: 64}},
		},
	}
	if err := stream.Send(request); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if response.ErrorMessage != "" {
			return errors.New(response.ErrorMessage)
		}
		for i, output := range response.InferResponse.Outputs {
			if output.Name == "text_output" {
				onText(firstString(response.InferResponse.RawOutputContents[i]))
			}
		}
	}
}

// firstString reads the first element of a raw BYTES tensor: four bytes of length, and the string.
func firstString(raw []byte) string {
	if len(raw) < 4 {
		return ""
	}
	return string(raw[4 : 4+binary.LittleEndian.Uint32(raw)])
}

// classify shows a classifier of 8 × 8 images a seven, and returns its outputs.
func classify(ctx context.Context, client pb.GRPCInferenceServiceClient, model string) (*pb.ModelInferResponse, error) {
	return client.ModelInfer(ctx, &pb.ModelInferRequest{
		ModelName:        model,
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{{Name: "image", Datatype: "FP32", Shape: []int64{1, 8, 8}}},
		RawInputContents: [][]byte{seven()},
	})
}

func seven() []byte {
	image := make([]float32, 64)
	for column := 1; column < 7; column++ {
		image[column] = 1
	}
	for row, column := range []int{5, 4, 4, 3, 3, 2, 2} {
		image[8*(row+1)+column], image[8*(row+1)+column+1] = 1, 1
	}
	raw := make([]byte, 4*len(image))
	for i, value := range image {
		binary.LittleEndian.PutUint32(raw[4*i:], math.Float32bits(value))
	}
	return raw
}

func run() error {
	target := flag.String("target", "127.0.0.1:8001", "gRPC side of a frontend")
	connections := flag.Int("connections", 4, "connections of the pool")
	requests := flag.Int("requests", 1, "requests at once")
	question := flag.String("text", "", "language model to complete the text that follows")
	classifier := flag.String("classify", "", "classifier of 8 × 8 images to show a seven")
	flag.Parse()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // the deadline travels to the worker
	defer cancel()
	if key := os.Getenv("DYNAMO_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	pool, err := NewPool(*target, *connections)
	if err != nil {
		return err
	}
	defer pool.Close()
	switch {
	case *question != "":
		err := ask(ctx, pool.Client(), *question, strings.Join(flag.Args(), " "), func(text string) { fmt.Print(text) })
		fmt.Println()
		return err
	case *classifier != "":
		return classifyAtOnce(ctx, pool, *classifier, *requests)
	}
	flag.Usage()
	return errors.New("say -text MODEL or -classify MODEL")
}

func classifyAtOnce(ctx context.Context, pool *Pool, model string, requests int) error {
	var calls sync.WaitGroup
	responses, failures := make([]*pb.ModelInferResponse, requests), make([]error, requests)
	for i := 0; i < requests; i++ {
		calls.Add(1)
		go func(i int) {
			defer calls.Done()
			responses[i], failures[i] = classify(ctx, pool.Client(), model)
		}(i)
	}
	calls.Wait()
	for _, err := range failures {
		if err != nil {
			return err
		}
	}
	for i, output := range responses[0].Outputs {
		fmt.Printf("%s %s %v: %d bytes\n", output.Name, output.Datatype, output.Shape, len(responses[0].RawOutputContents[i]))
	}
	fmt.Printf("%d requests over %d connections\n", requests, len(pool.connections))
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
