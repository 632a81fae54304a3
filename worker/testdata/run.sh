#!/bin/sh
# Runs in a worker VM as its command. Output goes to the second serial port,
# in the form of go test -v, between marks that say which section it is of.
exec >/dev/ttyS1 2>&1 </dev/null
stty raw -F /dev/ttyS1
export TMPDIR=/data/tmp DSEC_TEST_GUEST=/bin/dsec-guest DSEC_TEST_DEBIAN=/data/debian HOME=/data/home
mkdir -p $TMPDIR $HOME

section() {
	echo "@@@ begin $1"
	shift
	"$@"
	echo "@@@ end $?"
}

# check NAME COMMAND... is a test of one command.
check() {
	name=$1
	shift
	echo "=== RUN   $name"
	if "$@"; then echo "--- PASS: $name (0s)"; else echo "--- FAIL: $name (0s)"; failed=1; fi
}

# same FILE COMMAND says whether a command still prints what the file has.
same() { sh -c "$2" | diff "$1" -; }

host() {
	failed=0
	check Kernel sh -c 'uname -r | grep "^'$WORKER_KERNEL'\."'
	check LandlockIsOn grep -w landlock /sys/kernel/security/lsm
	check AppArmorIsOn grep -x Y /sys/module/apparmor/parameters/enabled
	for c in cpu memory pids; do
		check "Controller/$c" grep -w $c /sys/fs/cgroup/cgroup.controllers
	done
	check NoOldHierarchy sh -c '! grep " cgroup " /proc/mounts'
	check Address sh -c 'ip addr show dev eth0 | grep "inet 10.0.2.15/24"'
	check Route sh -c 'ip route | grep "default via 10.0.2.2"'
	check Doctor sh -c 'dsec doctor | tee /dev/stderr | grep -i "landlock.*version"'
	return $failed
}

# left prints what a node could leave on its host.
left='cut -d" " -f2,3 /proc/mounts; find /sys/fs/cgroup -type d; cat /sys/block/loop*/loop/backing_file 2>/dev/null; ps -o comm | grep dsec; ls /sys/class/net; cat /proc/swaps'

node() {
	failed=0
	mkdir -p /data/root/bin /data/root/etc /data/root/tmp
	cp /bin/busybox /data/root/bin/
	busybox --list | while read a; do [ $a = busybox ] || ln -s busybox /data/root/bin/$a; done
	echo root:x:0:0::/:/bin/sh > /data/root/etc/passwd
	sh -c "$left" > $TMPDIR/before
	check Up dsec up --data /data/node --detach
	check Import dsec image import /data/root --name small
	id=$(dsec create --image small --memory 64MiB)
	check Create test -n "$id"
	check Exec sh -c "dsec exec $id -- uname -r | grep '^$WORKER_KERNEL\.'"
	check Confined sh -c "! dsec exec $id -- mount -t tmpfs x /tmp"
	check Timeout sh -c "dsec exec --timeout 2s $id -- sh -c 'setsid sleep 1000 & sleep 1000'; test \$? = 124"
	check Memory sh -c "dsec exec $id -- tail /dev/zero; test \$? = 137"
	check Copy sh -c "dsec cp $id:/etc/passwd $TMPDIR/passwd && cmp $TMPDIR/passwd /data/root/etc/passwd"
	check Pause sh -c "dsec pause $id && dsec resume $id && dsec exec $id -- true"
	check Run sh -c 'test "$(dsec run --image small -- echo hello)" = hello'
	check Stop dsec stop $id
	check Down dsec down --data /data/node
	for i in 1 2 3 4 5; do same $TMPDIR/before "$left" >/dev/null && break; sleep 1; done
	check NothingIsLeft same $TMPDIR/before "$left"
	return $failed
}

section host host
