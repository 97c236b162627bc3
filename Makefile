# Everything that is built, tested and measured here has a target; CI calls only these.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -s -w -X main.version=$(VERSION) -X github.com/kvferry/kvferry/daemon.Version=$(VERSION)
VENV := .venv
# A real request trace; the demo has the beginning of one built in for where there is none.
TRACE ?= ../shared/traces/conversation.jsonl.gz

# Pinned tools. The last protoc whose Python code runs with protobuf 6 and 7 is that of grpcio-tools 1.74.
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
GRPCIO_TOOLS := grpcio-tools==1.74.0
PROTOC_GEN_GO := google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
PROTOC_GEN_GO_GRPC := google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.PHONY: build
build: setup ## build bin/kvferryd, bin/kvferry, the demo and the reference proxy
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/... ./examples/...

.PHONY: setup
setup: ## install what building and testing need (compiler, Python venv), if it is missing
	@scripts/setup

$(VENV)/installed: python/pyproject.toml python/setup.py $(wildcard csrc/copyshim/kvcopy.*) $(wildcard python/kvferry/*.c)
	@scripts/venv $(VENV)

.PHONY: test
test: build lint check-generated $(VENV)/installed ## what a change must pass: linters, Go tests with the race detector, Python tests (at most 8 minutes)
	$(GO) test -race -timeout 6m $$($(GO) list ./... | grep -vE '/(policy|replay|nvme|sim|process)$$')
	$(GO) test -timeout 6m ./tiers/policy ./tiers/replay ./tiers/nvme
	$(GO) test -count=1 ./daemon/sim -args -seeds 200
	$(VENV)/bin/python -m pytest -q -m 'not vllm' python/tests

.PHONY: test-crash
test-crash: build ## real processes that are killed, frozen and cut off, over real files; the simulation and the drives with the race detector
	$(GO) test -race -count=1 -timeout 12m ./standin/process ./daemon/sim ./tiers/nvme

.PHONY: race
race: build ## Go tests with the race detector
	$(GO) test -race -timeout 10m ./...

.PHONY: sim
sim: ## the seeded simulation, 200 seeds
	$(GO) test ./daemon/sim -count=1 -args -seeds 200

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (default 20s)
	@scripts/fuzz $(or $(FUZZTIME),20s)

.PHONY: lint
lint: setup ## gofmt, go vet, staticcheck
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo "not gofmt'ed:"; gofmt -l $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...

.PHONY: generate
generate: ## make the generated protobuf code anew
	@GRPCIO_TOOLS='$(GRPCIO_TOOLS)' PROTOC_GEN_GO='$(PROTOC_GEN_GO)' PROTOC_GEN_GO_GRPC='$(PROTOC_GEN_GO_GRPC)' scripts/generate .

.PHONY: check-generated
check-generated: ## fail when the generated code is not what its sources make
	@GRPCIO_TOOLS='$(GRPCIO_TOOLS)' PROTOC_GEN_GO='$(PROTOC_GEN_GO)' PROTOC_GEN_GO_GRPC='$(PROTOC_GEN_GO_GRPC)' scripts/check-generated

.PHONY: bench
bench: build $(VENV)/installed ## measure against this machine's limits (PEERS=1: and NIXL; NOVLLM=1: without bench-ttft); writes bench/out/
	$(GO) run ./bench $(if $(PEERS),--nixl "$$(scripts/peers-venv)")
	$(if $(NOVLLM),,scripts/bench-ttft | tee bench/out/ttft.json)

.PHONY: demo
demo: build ## two nodes, a real trace, every byte compared (KEEP=1 leaves it running)
	bin/kvferry-demo --trace "$(TRACE)" $(if $(KEEP),--keep)

.PHONY: demo-vllm
demo-vllm: build ## the same with real vLLM engines on this machine's CPU
	scripts/demo-vllm

.PHONY: bench-ttft
bench-ttft: build ## the time to the first token of a long prompt with real vLLM engines: recomputed, staged, direct, overlapped
	scripts/bench-ttft

.PHONY: test-vllm
test-vllm: build ## the connector with the real engine: the part that CI runs
	scripts/test-vllm

.PHONY: long
long: build $(VENV)/installed ## what takes longer than CI may: the rest of the vLLM tests, more seeds, longer fuzzing, a daemon killed 200 times, a soak of SOAK (default 20m)
	$(GO) test -count=1 -timeout 20m ./tiers -args -seeds 5000
	$(GO) test -count=1 -timeout 20m ./tiers/policy -run TestAgainstLRU -args -seeds 40
	$(GO) test -count=1 -timeout 30m ./tiers/nvme -args -seeds 10000 -kills 200
	$(GO) test -count=1 -timeout 60m ./daemon/sim -args -seeds 10000
	$(GO) test -count=1 -timeout 20m -run 'TestDaemonKilledUnderLoad|TestFlips' -v ./standin/process -args -daemon-kills 200 -flip-rounds 60
	$(GO) test -count=1 -timeout 60m -run TestSoak -v ./standin/process -args -soak $(or $(SOAK),20m)
	scripts/fuzz 2m
	scripts/test-vllm --long

.PHONY: clean
clean: ## remove what was built
	rm -rf bin bench/out $(VENV) python/build python/*.egg-info
