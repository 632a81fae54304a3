# make build    bin/dsec and bin/dsec-guest
# make test     everything that is checked; what CI runs
# make demo     a real task in 64 sandboxes at once
# make worker   the image of a virtual machine that is a node
# make vm       the disk image of a Debian virtual machine
# make kernel   the kernels of virtual machines, from Debian's packages
# make test-runtimes  function calls in C, C++, Go, Node and the others, with Debian's; by hand, before a release
# make test-uefi  a full VM with UEFI firmware; by hand, before a release
# make test-stores  blobs on a replicated SeaweedFS that loses a server; by hand, before a release
# make compare  the same jobs on DSec, runc and podman
# make generate the wire types from their schema
#
# A fresh Debian 12 with Go needs no other step: what is missing is installed.

SHELL       := bash
.SHELLFLAGS := -o pipefail -ec
GO          ?= go

# No C compiler is needed, and what is built runs anywhere.
export CGO_ENABLED := 0

.PHONY: all build deps stores-deps debian kernel kernel-deps demo-deps compare-deps test test-stores stores demo compare generate clean
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
	$(call install,ca-certificates erofs-utils e2fsprogs python3 busybox-static gcc libc6-dev runc mount kmod procps skopeo umoci)

kernel-deps:
	$(call install,xz-utils qemu-system-x86 e2fsprogs)

stores-deps:
	$(call install,fuse3)

demo-deps:
	$(call install,mmdebstrap python3)

compare-deps:
	$(call install,runc podman gcc libc6-dev)

# Each package is shown in one line, a failed one with all it printed. Under
# CI=true a test that skipped fails the run: a missing feature is a fault there.
# One package at a time, since several compare the host's mounts, control groups
# and processes before and after.
#
# What runs that were killed have left goes first.
test: deps debian kernel vm stores build
	@.ci/sweep
	@$(GO) test -p 1 -v -timeout 12m ./... 2>&1 | awk -f .ci/report.awk

# Guest kernels with their modules, fetched once; nothing is installed.
kernel: kernel-deps
	@$(GO) build -o bin/vmimage ./vmimage
	@bin/vmimage kernel 6.12 6.1

# An S3 server over a folder, from its module; a minute the first time.
VERSITYGW := v1.8.0

stores:
	@$(GO) version -m bin/stores/versitygw 2>/dev/null | grep -q 'versity/versitygw[[:space:]]$(VERSITYGW)' || \
	    GOBIN=$(CURDIR)/bin/stores $(GO) install github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW)

# Its module has a replace line, which "go install" refuses; a module of ours repeats it.
test-stores: deps stores-deps stores
	@cd blob/s3/testdata/seaweedfs && $(GO) build -o $(CURDIR)/bin/stores/weed github.com/seaweedfs/seaweedfs/weed
	@$(GO) test -p 1 -count 1 -tags stores -v -timeout 30m ./blob/... 2>&1 | awk -f .ci/report.awk

# A Debian with every runtime of function calls, from this machine's own apt sources.
RUNTIMES := python3,gcc,libc6-dev,g++,golang-go,nodejs

.cache/runtimes.tar: | runtimes-deps
	@mkdir -p .cache
	@release=$$(. /etc/os-release; echo $$VERSION_CODENAME); \
	sources=$$(apt-get indextargets --format '$$(ORIGIN) $$(CODENAME) deb $$(REPO_URI) $$(RELEASE) $$(COMPONENT)' 'Created-By: Packages' | sed -n "s/^Debian $$release[^ ]* //p"); \
	mmdebstrap --quiet --variant=minbase --format=tar --include=$(RUNTIMES) --dpkgopt='path-exclude=/usr/share/doc/*' $$release $@.part $${sources:+"$$sources"}
	@mv $@.part $@

.PHONY: runtimes-deps test-runtimes
runtimes-deps:
	$(call install,mmdebstrap busybox-static)

test-runtimes: .cache/runtimes.tar
	@$(GO) test -count 1 -tags runtimes -run TestRealRuntimes -v ./driver/fncall 2>&1 | awk -f .ci/report.awk

# A second boot of Debian takes minutes where it is emulated.
.PHONY: test-uefi
test-uefi: vm
	@$(GO) test -count 1 -tags uefi -run TestUEFI -v ./driver/fullvm 2>&1 | awk -f .ci/report.awk

# A Debian system on a disk, for sandboxes of kind fullvm. All but our own agent in
# it is made once, in a few minutes.
.PHONY: vm vm-deps
vm-deps:
	$(call install,qemu-system-x86 qemu-utils seabios ovmf mmdebstrap syslinux syslinux-common systemd-boot-efi mtools e2fsprogs grub-rescue-pc)

vm: vm-deps build
	@$(GO) build -o bin/vmimage ./vmimage
	@bin/vmimage debian

# A machine that is a node, see docs/worker-vm.md.
.PHONY: worker
worker: deps kernel build
	@$(GO) build -ldflags '-s -w' -o bin/worker ./worker
	@for k in 6.12 6.1; do bin/vmimage worker -kernel $$k; done

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
