# make build    bin/dsec and bin/dsec-guest
# make test     everything that is checked; what CI runs
# make demo     a real task in 64 sandboxes at once
# make compare  the same jobs on DSec, runc and podman
# make generate the wire types from their schema
#
# A fresh Debian 12 with Go needs no other step: what is missing is installed.

SHELL       := bash
.SHELLFLAGS := -o pipefail -ec
GO          ?= go

# No C compiler is needed, and what is built runs anywhere.
export CGO_ENABLED := 0

.PHONY: all build deps debian demo-deps compare-deps test demo compare generate clean
all: build

build:
	@$(GO) build -o bin/dsec ./cmd/dsec
	@$(GO) build -trimpath -ldflags '-s -w' -o bin/dsec-guest ./cmd/dsec-guest

# Packages are installed only when they are missing, and the package lists are
# fetched only then.
define install
	@missing=$$(for p in $(1); do \
	    dpkg-query -W -f '$${db:Status-Status}\n' $$p 2>/dev/null | grep -qx installed || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	    echo "installing" $$missing; \
	    apt-get update -qq </dev/null && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing </dev/null >/dev/null; \
	fi
endef

deps:
	$(call install,erofs-utils python3 busybox-static gcc libc6-dev runc)

demo-deps:
	$(call install,mmdebstrap python3)

compare-deps:
	$(call install,runc podman gcc libc6-dev)

# Each package is shown in one line, a failed one with all it printed. Under
# CI=true a test that skipped fails the run: a missing feature is a fault there.
# One package at a time, since several compare the host's mounts, control groups
# and processes before and after.
test: deps debian build
	@$(GO) test -p 1 -v -timeout 12m ./... 2>&1 | awk -f .ci/report.awk

# A Debian root file system, made once.
debian: demo-deps
	@$(GO) build -o bin/demo ./demo
	@bin/demo -prepare

demo: debian build
	@bin/demo

compare: compare-deps build
	@bin/dsec bench compare

generate:
	@$(GO) tool -modfile=tools.mod buf generate

clean:
	@rm -rf bin
