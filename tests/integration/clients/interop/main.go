// Calls a frontend with grpc-go and prints one line for each check: its name, a colon, and what came of it.
//
//	interop TARGET TLS_TARGET CA_FILE
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"

	pb "example.org/dynamo-grpc-client/inference"
)

func infer(client pb.GRPCInferenceServiceClient, model string, raw []byte, options ...grpc.CallOption) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	input := &pb.ModelInferRequest_InferInputTensor{Name: "INPUT0", Datatype: "FP32", Shape: []int64{int64(len(raw) / 4)}}
	response, err := client.ModelInfer(ctx, &pb.ModelInferRequest{
		ModelName:        model,
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{input},
		RawInputContents: [][]byte{raw},
	}, options...)
	if err != nil {
		return nil, err
	}
	return response.RawOutputContents[0], nil
}

func float(value float32) []byte {
	raw := make([]byte, 4)
	binary.LittleEndian.PutUint32(raw, math.Float32bits(value))
	return raw
}

func echoed(client pb.GRPCInferenceServiceClient, value float32, options ...grpc.CallOption) (string, error) {
	raw, err := infer(client, "echo", float(value), options...)
	if err != nil {
		return "", err
	}
	return fmt.Sprint(math.Float32frombits(binary.LittleEndian.Uint32(raw))), nil
}

func count(start int32, pauseMs int64) *pb.ModelInferRequest {
	raw := make([]byte, 4)
	binary.LittleEndian.PutUint32(raw, uint32(start))
	pause := &pb.InferParameter{ParameterChoice: &pb.InferParameter_Int64Param{Int64Param: pauseMs}}
	return &pb.ModelInferRequest{
		ModelName:        "countdown",
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{{Name: "start", Datatype: "INT32", Shape: []int64{1}}},
		RawInputContents: [][]byte{raw},
		Parameters:       map[string]*pb.InferParameter{"pause_ms": pause},
	}
}

func left(response *pb.ModelInferResponse) int32 {
	for i, output := range response.Outputs {
		if output.Name == "left" {
			return int32(binary.LittleEndian.Uint32(response.RawOutputContents[i]))
		}
	}
	return -1
}

// countdown returns what the stream responds to the requests, the next of which goes out after the last response to the one before.
func countdown(ctx context.Context, client pb.GRPCInferenceServiceClient, pauseMs int64, starts ...int32) (string, error) {
	stream, err := client.ModelStreamInfer(ctx)
	if err != nil {
		return "", err
	}
	var seen []string
	for _, start := range starts {
		if err := stream.Send(count(start, pauseMs)); err != nil {
			return "", err
		}
		for last := false; !last; {
			message, err := stream.Recv()
			if err != nil {
				return "", err
			}
			if last = message.ErrorMessage != ""; last {
				seen = append(seen, message.ErrorMessage)
			} else {
				seen = append(seen, fmt.Sprint(left(message.InferResponse)))
				last = left(message.InferResponse) == 0
			}
		}
	}
	if err := stream.CloseSend(); err != nil {
		return "", err
	}
	switch _, err := stream.Recv(); err {
	case io.EOF:
		return strings.Join(seen, " "), nil
	case nil:
		return "", errors.New("the stream goes on")
	default: // A deadline that has passed comes as the last message of the stream, too, if the server sees it first.
		return "", err
	}
}

func cancelled(client pb.GRPCInferenceServiceClient) (string, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := client.ModelStreamInfer(ctx)
	if err == nil {
		err = stream.Send(count(1000, 1000))
	}
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		return "", err
	}
	cancel()
	_, err = stream.Recv()
	return "", err
}

func atOnce(client pb.GRPCInferenceServiceClient) (string, error) {
	var calls sync.WaitGroup
	results := make([]string, 100)
	for i := range results {
		calls.Add(1)
		go func(i int) {
			defer calls.Done()
			result, err := echoed(client, float32(i))
			if err != nil {
				fmt.Fprintln(os.Stderr, i, err)
			}
			results[i] = result
		}(i)
	}
	calls.Wait()
	right := 0
	for i, result := range results {
		if result == fmt.Sprint(i) {
			right++
		}
	}
	return fmt.Sprint(right), nil
}

func dial(target string, option grpc.DialOption) pb.GRPCInferenceServiceClient {
	connection, err := grpc.Dial(target, option)
	if err != nil {
		panic(err)
	}
	return pb.NewGRPCInferenceServiceClient(connection)
}

func main() {
	client := dial(os.Args[1], grpc.WithInsecure())
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	checks := []struct {
		name string
		run  func() (string, error)
	}{
		{"unary", func() (string, error) { return echoed(client, 3.5) }},
		{"gzip", func() (string, error) { return echoed(client, 3.5, grpc.UseCompressor(gzip.Name)) }},
		{"big", func() (string, error) {
			raw, err := infer(client, "echo", make([]byte, 3<<20))
			return fmt.Sprint(len(raw)), err
		}},
		{"too large", func() (string, error) { _, err := infer(client, "echo", make([]byte, 5<<20)); return "", err }},
		{"stream", func() (string, error) { return countdown(ctx, client, 0, 1, 2) }},
		{"stream error", func() (string, error) { return countdown(ctx, client, 0, -1) }},
		{"error", func() (string, error) { _, err := infer(client, "Zürich", float(1)); return "", err }},
		{"deadline", func() (string, error) {
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			return countdown(short, client, 1000, 1000)
		}},
		{"cancel", func() (string, error) { return cancelled(client) }},
		{"at once", func() (string, error) { return atOnce(client) }},
		{"silence", func() (string, error) { return countdown(ctx, client, 2500, 1) }},
		{"tls", func() (string, error) {
			ca, err := credentials.NewClientTLSFromFile(os.Args[3], "")
			if err != nil {
				return "", err
			}
			return echoed(dial(os.Args[2], grpc.WithTransportCredentials(ca)), 3.5)
		}},
	}
	for _, check := range checks {
		result, err := check.run()
		switch code := status.Code(err); {
		case code == codes.DeadlineExceeded:
			result = "DEADLINE_EXCEEDED" // its words are the client's
		case code == codes.Canceled:
			result = "CANCELLED"
		case code == codes.NotFound:
			result = "NOT_FOUND " + status.Convert(err).Message()
		case code == codes.ResourceExhausted:
			result = "RESOURCE_EXHAUSTED " + status.Convert(err).Message()
		case err != nil:
			result = err.Error()
		}
		fmt.Printf("%s: %s\n", check.name, result)
	}
}
