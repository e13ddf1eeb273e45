// Exercises a server's service test.Wire with grpc-go. usage: grpc_go HOST:PORT [CERTIFICATE]
// Prints one line of JSON per check: {"name": ..., "found": ...}; the test compares.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// plain hands messages on as the bytes that they are.
type plain struct{}

func (plain) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }
func (plain) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = data
	return nil
}
func (plain) Name() string { return "proto" }

var raw = grpc.ForceCodec(plain{})

var connection *grpc.ClientConn

// Every call has a deadline, so every header block has a value that the one before had not.
func inTime(limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), limit)
}

func unary(name string, message []byte, more ...grpc.CallOption) ([]byte, error) {
	patience, cancel := inTime(90 * time.Second)
	defer cancel()
	var answer []byte
	err := connection.Invoke(patience, "/test.Wire/"+name, &message, &answer, append(more, raw)...)
	return answer, err
}

func stream(name string, messages [][]byte) ([][]byte, error) {
	patience, cancel := inTime(90 * time.Second)
	defer cancel()
	both := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	call, err := connection.NewStream(patience, both, "/test.Wire/"+name, raw)
	if err != nil {
		return nil, err
	}
	go func() {
		for index := range messages {
			call.SendMsg(&messages[index])
		}
		call.CloseSend()
	}()
	var answers [][]byte
	for {
		var answer []byte
		if err := call.RecvMsg(&answer); err != nil {
			if err.Error() == "EOF" {
				return answers, nil
			}
			return answers, err
		}
		answers = append(answers, answer)
	}
}

func report(name string, found interface{}) {
	line, _ := json.Marshal(map[string]interface{}{"name": name, "found": found})
	fmt.Println(string(line))
}

func equal(one, other [][]byte) bool {
	if len(one) != len(other) {
		return false
	}
	for index := range one {
		if !bytes.Equal(one[index], other[index]) {
			return false
		}
	}
	return true
}

func main() {
	var err error
	large := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30), grpc.MaxCallSendMsgSize(1<<30))
	security := grpc.WithInsecure()
	if len(os.Args) > 2 {
		trusted, err := credentials.NewClientTLSFromFile(os.Args[2], "")
		if err != nil {
			panic(err)
		}
		security = grpc.WithTransportCredentials(trusted)
	}
	connection, err = grpc.Dial(os.Args[1], security, large)
	if err != nil {
		panic(err)
	}
	defer connection.Close()

	for _, size := range []int{0, 1, 16379, 65536, 1 << 20, 64 << 20} {
		message := bytes.Repeat([]byte{'x'}, size)
		answer, err := unary("Echo", message)
		report(fmt.Sprintf("unary %d", size), err == nil && bytes.Equal(answer, message))
	}

	var group sync.WaitGroup
	wrong := make(chan string, 2000)
	for worker := 0; worker < 16; worker++ {
		group.Add(1)
		go func(worker int) {
			defer group.Done()
			for number := 0; number < 100; number++ {
				message := []byte(fmt.Sprintf("%d of %d", number, worker))
				if answer, err := unary("Echo", message); err != nil || !bytes.Equal(answer, message) {
					wrong <- fmt.Sprint(err)
				}
			}
		}(worker)
	}
	group.Wait()
	report("many", len(wrong) == 0)

	var messages [][]byte
	for number := 0; number < 1000; number++ {
		messages = append(messages, []byte(fmt.Sprintf("message %d", number)))
	}
	answers, err := stream("Chat", messages)
	report("chat", err == nil && equal(answers, messages))
	answers, err = stream("Count", [][]byte{[]byte("1000 1000")})
	report("count", len(answers))
	answers, err = stream("Sum", messages)
	report("sum", string(answers[0]))
	answers, err = stream("FailLate", messages[:1])
	report("late", []interface{}{len(answers), status.Code(err), status.Convert(err).Message()})

	_, err = unary("Fail", []byte("5 100 % é漢\nend"))
	report("error", []interface{}{status.Code(err), status.Convert(err).Message()})
	_, err = unary("Nothing", nil)
	report("unknown", status.Code(err))

	patience, cancel := inTime(100 * time.Millisecond)
	var nothing, answer []byte
	err = connection.Invoke(patience, "/test.Wire/Hold", &nothing, &answer, raw)
	cancel()
	report("deadline", status.Code(err))

	patience, cancel = inTime(90 * time.Second)
	time.AfterFunc(200*time.Millisecond, cancel)
	err = connection.Invoke(patience, "/test.Wire/Hold", &nothing, &answer, raw)
	report("cancelled", status.Code(err))

	patience, cancel = inTime(90 * time.Second)
	patience = metadata.AppendToOutgoingContext(patience, "x-text", "a value", "x-data-bin", "\x00\x01\xfe\xff")
	err = connection.Invoke(patience, "/test.Wire/Metadata", &nothing, &answer, raw)
	cancel()
	var seen map[string]interface{}
	json.Unmarshal(answer, &seen)
	report("metadata", []interface{}{seen["x-text"], seen["x-data-bin"]})

	long := bytes.Repeat([]byte("compressible "), 10000)
	answer, err = unary("Echo", long, grpc.UseCompressor("gzip"))
	report("gzip", err == nil && bytes.Equal(answer, long))
}
