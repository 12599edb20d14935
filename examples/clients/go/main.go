// A client in Go, of the standard library alone: streams a chat over the OpenAI API, and asks a classifier over KServe's REST
// protocol.
//
//	go run . -url http://127.0.0.1:8000 -chat smollm2 "Why is the sea salty?"
//	go run . -url http://127.0.0.1:8000 -classify classifier
//
// With an API key: DYNAMO_API_KEY=… go run . …
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"time"
)

// Client asks one frontend.
type Client struct {
	URL string
	Key string
}

// APIError is what a frontend answers instead of a result.
type APIError struct {
	Status     int
	Message    string
	RetryAfter string // seconds, where trying again makes sense
}

func (e *APIError) Error() string {
	if e.RetryAfter != "" {
		return fmt.Sprintf("%d: %s (try again in %s s)", e.Status, e.Message, e.RetryAfter)
	}
	return fmt.Sprintf("%d: %s", e.Status, e.Message)
}

func (c *Client) post(ctx context.Context, path string, body any) (*http.Response, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+path, bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	if c.Key != "" {
		request.Header.Set("Authorization", "Bearer "+c.Key)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode == http.StatusOK {
		return response, nil
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<16))
	if err != nil {
		return nil, err
	}
	return nil, &APIError{response.StatusCode, messageOf(text), response.Header.Get("Retry-After")}
}

// messageOf finds the sentence in OpenAI's form of an error, {"error": {"message": …}}, or KServe's, {"error": …}.
func messageOf(body []byte) string {
	var openAI struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	var kserve struct {
		Error string `json:"error"`
	}
	if json.Unmarshal(body, &openAI) == nil && openAI.Error.Message != "" {
		return openAI.Error.Message
	}
	if json.Unmarshal(body, &kserve) == nil && kserve.Error != "" {
		return kserve.Error
	}
	return string(body)
}

// Chat hands each piece of the answer to onText as it comes. A stream that breaks off without its last word is an error.
func (c *Client) Chat(ctx context.Context, model, question string, onText func(string)) error {
	response, err := c.post(ctx, "/v1/chat/completions", map[string]any{
		"model":      model,
		"stream":     true,
		"max_tokens": 128,
		"messages":   []map[string]string{{"role": "user", "content": question}},
	})
	if err != nil {
		return err
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data := strings.TrimPrefix(lines.Text(), "data: ")
		if data == lines.Text() { // an empty line, or a comment that keeps the connection alive
			continue
		}
		if data == "[DONE]" {
			return nil
		}
		var event struct {
			Choices []struct {
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
			} `json:"choices"`
			Error *struct {
				Message string `json:"message"`
			} `json:"error"`
		}
		if err := json.Unmarshal([]byte(data), &event); err != nil {
			return err
		}
		if event.Error != nil {
			return errors.New(event.Error.Message)
		}
		for _, choice := range event.Choices {
			onText(choice.Delta.Content)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF
}

// Tensor is an input or output of KServe's REST protocol.
type Tensor struct {
	Name     string `json:"name"`
	Datatype string `json:"datatype"`
	Shape    []int  `json:"shape"`
	Data     any    `json:"data"`
}

// Infer asks a tensor model.
func (c *Client) Infer(ctx context.Context, model string, inputs ...Tensor) ([]Tensor, error) {
	response, err := c.post(ctx, "/v2/models/"+model+"/infer", map[string]any{"inputs": inputs})
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	var answer struct {
		Outputs []Tensor `json:"outputs"`
	}
	return answer.Outputs, json.NewDecoder(response.Body).Decode(&answer)
}

func run() error {
	url := flag.String("url", "http://127.0.0.1:8000", "HTTP side of a frontend")
	chat := flag.String("chat", "", "language model to ask the question that follows")
	classify := flag.String("classify", "", "classifier of 8 × 8 images to show a seven")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt) // leaving early frees the worker
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	client := &Client{URL: *url, Key: os.Getenv("DYNAMO_API_KEY")}
	switch {
	case *chat != "":
		err := client.Chat(ctx, *chat, strings.Join(flag.Args(), " "), func(text string) { fmt.Print(text) })
		fmt.Println()
		return err
	case *classify != "":
		outputs, err := client.Infer(ctx, *classify, Tensor{"image", "FP32", []int{1, 8, 8}, seven()})
		for _, output := range outputs {
			fmt.Println(output.Name, output.Data)
		}
		return err
	}
	flag.Usage()
	return errors.New("say -chat MODEL or -classify MODEL")
}

func seven() []float32 {
	image := make([]float32, 64)
	for column := 1; column < 7; column++ {
		image[column] = 1
	}
	for row, column := range []int{5, 4, 4, 3, 3, 2, 2} {
		image[8*(row+1)+column], image[8*(row+1)+column+1] = 1, 1
	}
	return image
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
