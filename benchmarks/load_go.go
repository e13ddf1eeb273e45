// Closed-loop gRPC load by grpc-go: every call has a deadline, so no header block is like another.
// Reads the JSON job of benchmarks/load.py on standard input, prints a JSON LoadResult on standard output.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"sync"
	"time"

	"google.golang.org/grpc"
)

type job struct {
	Path        string  `json:"path"`
	Body        []byte  `json:"body"`
	Concurrency int     `json:"concurrency"`
	Connections int     `json:"connections"`
	Seconds     float64 `json:"seconds"`
	WarmupS     float64 `json:"warmup_s"`
	Port        int     `json:"port"`
}

// plain hands messages on as the bytes that they are.
type plain struct{}

func (plain) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }
func (plain) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = data
	return nil
}
func (plain) Name() string { return "proto" }

// tally is what one caller has seen after the warm-up.
type tally struct {
	latencies []time.Duration
	failed    int
	err       error
}

func call(connection *grpc.ClientConn, todo *job, started, deadline time.Time) tally {
	var seen tally
	for {
		sent := time.Now()
		if !sent.Before(deadline) {
			return seen
		}
		patience, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		var answer []byte
		err := connection.Invoke(patience, todo.Path, &todo.Body, &answer, grpc.ForceCodec(plain{}))
		cancel()
		if err != nil {
			seen.failed++
			seen.err = err
		} else if sent.After(started) {
			seen.latencies = append(seen.latencies, time.Since(sent))
		}
	}
}

func main() {
	var todo job
	if err := json.NewDecoder(os.Stdin).Decode(&todo); err != nil {
		panic(err)
	}
	large := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30), grpc.MaxCallSendMsgSize(1<<30))
	var connections []*grpc.ClientConn
	for len(connections) < todo.Connections {
		connection, err := grpc.Dial(fmt.Sprintf("127.0.0.1:%d", todo.Port), grpc.WithInsecure(), grpc.WithBlock(), large)
		if err != nil {
			panic(err)
		}
		defer connection.Close()
		connections = append(connections, connection)
	}
	started := time.Now().Add(time.Duration(todo.WarmupS * float64(time.Second)))
	deadline := started.Add(time.Duration(todo.Seconds * float64(time.Second)))
	tallies := make([]tally, todo.Concurrency)
	var group sync.WaitGroup
	for index := range tallies {
		group.Add(1)
		go func(index int) {
			defer group.Done()
			tallies[index] = call(connections[index%len(connections)], &todo, started, deadline)
		}(index)
	}
	group.Wait()
	seconds := time.Since(started).Seconds()
	var all []time.Duration
	failed := 0
	for _, seen := range tallies {
		all = append(all, seen.latencies...)
		failed += seen.failed
		if seen.err != nil {
			fmt.Fprintln(os.Stderr, seen.err)
		}
	}
	sort.Slice(all, func(one, other int) bool { return all[one] < all[other] })
	percentile := func(share float64) float64 {
		if len(all) == 0 {
			return 0
		}
		return float64(all[int(share*float64(len(all)-1))].Microseconds())
	}
	json.NewEncoder(os.Stdout).Encode(map[string]interface{}{
		"count": len(all), "failed": failed, "seconds": seconds,
		"p50_us": percentile(0.5), "p99_us": percentile(0.99),
	})
}
