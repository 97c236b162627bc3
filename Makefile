# Everything that is built, tested and measured here has a target; CI calls only these.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
GO ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -s -w -X github.com/kvferry/kvferry/daemon.Version=$(VERSION)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.PHONY: build
build: ## build bin/kvferryd, bin/kvferry and the demo
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...
