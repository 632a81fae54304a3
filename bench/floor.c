//go:build ignore

/*
 * floor: the least that a sandbox costs on this kernel, as raw system calls
 * without a daemon, a protocol or a runtime. "dsec bench" compiles it with
 * "cc -O2 -static" and holds every budget against what it prints.
 *
 *   floor [options] box N GAP     N boxes one after another, GAP ms of quiet between
 *   floor [options] boxes N C     N boxes by C processes at a time
 *   floor spawn N GAP PROGRAM     N times fork, exec of PROGRAM, wait
 *   floor pipe BYTES PROGRAM      how fast a child's output can be read
 *   floor -g NAME reclaim N BYTES how fast one thread takes back the memory of N
 *                                 processes that hold so much each
 *
 *   -d DIR      empty folder for writable layers; required for boxes
 *   -g NAME     of the control groups, unique on the host; required for boxes
 *   -l LAYER    a folder, or META[,DATA...] of an EROFS image; repeat, lowest first
 *   -u ID       first host id that boxes may use (default 0x7f000000)
 *   -x PROGRAM  what a box executes (default /bin/true)
 *
 * A box is what package jail makes, without what a sandbox has beyond one
 * command: user namespace with 65,536 ids, mount, pid, net, ipc, uts and cgroup
 * namespaces; control groups with limits for memory, CPU and processes; an
 * overlay of the mounted layers, idmapped, with a fresh writable layer; proc
 * and a minimal /dev; pivot; exec of a static program; its exit status; and
 * then everything destroyed. There is no seccomp filter, no masking, no reaper,
 * no sysfs: those are ours to pay for. Layers are mounted once, before timing.
 *
 * Output is one JSON object a line, times in microseconds. Every failure ends
 * the program with a message and status 1.
 *
 * Called as "true", "pause", "burn", "write" or "hold", it is what runs in sandboxes:
 *
 *   true            exits
 *   pause           does nothing until killed
 *   burn MS         uses MS milliseconds of CPU
 *   write BYTES     writes zeros
 *   hold BYTES      has so much memory, half of it random, says "ready" and does
 *                   nothing until killed
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* From <sys/mount.h>, which does not go together with <linux/mount.h>. */
int mount(const char *, const char *, const char *, unsigned long, const void *);
int umount2(const char *, int);
#define MNT_DETACH 2

enum { MAX_LAYERS = 32, IDS = 65536, PATH = 512 };

static const char *dir, *group, *program = "/bin/true";
static unsigned first_id = 0x7f000000;
static int layers[MAX_LAYERS], n_layers;
static char at[PATH]; /* where a box attaches its root, in its own namespace */
static int v2;

static const char *const controllers[] = {"memory", "cpu", "cpuacct", "pids", "freezer"};
enum { N_CONTROLLERS = 5 };

static const char *const devices[] = {"null", "zero", "full", "random", "urandom", "tty"};
enum { N_DEVICES = 6 };

static void die(const char *format, ...) {
	int e = errno;
	va_list ap;
	va_start(ap, format);
	fprintf(stderr, "floor: ");
	vfprintf(stderr, format, ap);
	fprintf(stderr, ": %s\n", strerror(e));
	va_end(ap);
	_exit(1);
}

static double now(void) { /* microseconds */
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void rest(long ms) {
	struct timespec t = {ms / 1000, ms % 1000 * 1000000};
	if (ms > 0) nanosleep(&t, 0);
}

static void put(const char *path, const char *text) {
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, text, strlen(text)) < 0) die("write %s to %s", text, path);
	close(fd);
}

/* ---- layers ---- */

static void die_fs(int fs, const char *what) {
	char text[512];
	int e = errno;
	ssize_t n = read(fs, text, sizeof text); /* what the kernel says to it */
	errno = e;
	die("mount %s (%.*s)", what, n > 0 ? (int)n : 0, text);
}

static int set_string(int fs, const char *key, const char *value) {
	return syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, value, 0);
}

static int mount_layer(char *spec) {
	struct stat st;
	char *meta = strtok(spec, ",");
	if (stat(meta, &st)) die("layer %s", meta);
	if (S_ISDIR(st.st_mode)) {
		int fd = syscall(SYS_open_tree, AT_FDCWD, meta, OPEN_TREE_CLONE | O_CLOEXEC);
		if (fd < 0) die("open_tree %s", meta);
		return fd;
	}
	int fs = syscall(SYS_fsopen, "erofs", FSOPEN_CLOEXEC);
	if (fs < 0 || set_string(fs, "source", meta)) die("fsopen erofs");
	syscall(SYS_fsconfig, fs, FSCONFIG_SET_FLAG, "ro", 0, 0);
	for (char *d; (d = strtok(0, ","));)
		if (set_string(fs, "device", d)) die("device %s", d);
	if (syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, 0, 0, 0)) die_fs(fs, meta);
	int fd = syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV);
	if (fd < 0) die("fsmount %s", meta);
	close(fs);
	return fd;
}

/* ---- control groups ---- */

static void group_path(char *to, const char *controller, const char *box, const char *file) {
	snprintf(to, PATH, "/sys/fs/cgroup%s%s/%s%s%s%s%s", *controller ? "/" : "", controller, group,
		 box ? "/" : "", box ? box : "", file ? "/" : "", file ? file : "");
}

static void make_group(const char *controller, const char *box) {
	char p[PATH];
	group_path(p, controller, box, 0);
	if (mkdir(p, 0755) && errno != EEXIST) die("mkdir %s", p);
}

static void remove_group(const char *controller, const char *box) {
	char p[PATH];
	group_path(p, controller, box, 0);
	for (int i = 0; rmdir(p); i++) {
		if (errno == ENOENT) return;
		if (errno != EBUSY || i > 20000) die("rmdir %s", p);
		usleep(50); /* the last process is just being forgotten */
	}
}

static void limit(const char *controller, const char *box, const char *file, const char *text) {
	char p[PATH];
	group_path(p, controller, box, file);
	put(p, text);
}

static void open_groups(void) {
	char text[256] = "";
	int fd = open("/sys/fs/cgroup/cgroup.controllers", O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		if (read(fd, text, sizeof text - 1) < 0) die("cgroup.controllers");
		close(fd);
	}
	v2 = strstr(text, "memory") != 0;
	if (v2) {
		put("/sys/fs/cgroup/cgroup.subtree_control", "+memory +cpu +pids");
		make_group("", 0);
		limit("", 0, "cgroup.subtree_control", "+memory +cpu +pids");
	} else {
		for (int i = 0; i < N_CONTROLLERS; i++) make_group(controllers[i], 0);
	}
}

static void close_groups(void) {
	if (v2) remove_group("", 0);
	else
		for (int i = 0; i < N_CONTROLLERS; i++) remove_group(controllers[i], 0);
}

/* Limits differ from box to box, as those of sandboxes in the bench do. */
static void make_limits(const char *box, long serial) {
	char memory[32], cpu[32], pids[32];
	snprintf(memory, sizeof memory, "%ld", (256L << 20) + (serial % 65536 << 12));
	snprintf(pids, sizeof pids, "%ld", 128 + serial % 64);
	if (v2) {
		make_group("", box);
		snprintf(cpu, sizeof cpu, "%ld 100000", 100000 + serial % 1000);
		limit("", box, "memory.max", memory);
		limit("", box, "cpu.max", cpu);
		limit("", box, "pids.max", pids);
		return;
	}
	for (int i = 0; i < N_CONTROLLERS; i++) make_group(controllers[i], box);
	snprintf(cpu, sizeof cpu, "%ld", 100000 + serial % 1000);
	limit("memory", box, "memory.limit_in_bytes", memory);
	limit("cpu", box, "cpu.cfs_quota_us", cpu);
	limit("pids", box, "pids.max", pids);
}

/* ---- one box ---- */

/* Steps of a box, in order. The first five are the maker's, then the box's. */
enum { GROUPS, FOLDERS, CLONE, MAPS, OVERLAY, ENTER, MOUNTS, PIVOT, JOIN, EXEC, DESTROY, STEPS };
static const char *const names[] = {"groups", "folders", "clone", "maps", "overlay", "enter", "mounts", "pivot", "join", "exec", "destroy"};

struct shared { /* between a maker and its box */
	double begin, stamp[STEPS];
	int root; /* descriptor of the root; the table is shared until the exec */
};

struct box {
	char name[32], path[PATH];
	int tasks[N_CONTROLLERS], go[2];
	struct shared *s;
};

/* inside is the life of a box's only process. */
static void inside(struct box *b) {
	char c;
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* until it has other credentials */
	if (read(b->go[0], &c, 1) != 1) die("wait for the maker");
	/* Still the host's root for files: the folders above are the host's own. */
	if (syscall(SYS_move_mount, b->s->root, "", AT_FDCWD, at, MOVE_MOUNT_F_EMPTY_PATH)) die("attach root");
	if (chdir(at)) die("chdir %s", at);
	if (syscall(SYS_setresgid, 0, 0, 0) || syscall(SYS_setresuid, 0, 0, 0) || syscall(SYS_setgroups, 0, 0)) die("become root of the box");
	struct ifreq up = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (sock < 0 || ioctl(sock, SIOCSIFFLAGS, &up)) die("loopback up");
	close(sock);
	if (sethostname("floor", 5)) die("sethostname");
	b->s->stamp[ENTER] = now();

	const unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC;
	if (mount("proc", "proc", "proc", flags, 0)) die("mount proc");
	if (mount("tmpfs", "dev", "tmpfs", MS_NOSUID, "mode=755,size=64k")) die("mount dev");
	for (int i = 0; i < N_DEVICES; i++) {
		char from[32], to[32];
		snprintf(from, sizeof from, "/dev/%s", devices[i]);
		int fd = open(from + 1, O_CREAT | O_WRONLY | O_CLOEXEC, 0666);
		if (fd < 0) die("make %s", from);
		close(fd);
		snprintf(to, sizeof to, "dev/%s", devices[i]);
		if (mount(from, to, 0, MS_BIND, 0)) die("bind %s", from);
	}
	b->s->stamp[MOUNTS] = now();

	if (syscall(SYS_pivot_root, ".", ".")) die("pivot_root");
	if (umount2(".", MNT_DETACH)) die("umount old root");
	if (chdir("/")) die("chdir /");
	b->s->stamp[PIVOT] = now();

	if (!v2)
		for (int i = 0; i < N_CONTROLLERS; i++)
			if (write(b->tasks[i], "0", 1) != 1) die("join %s", controllers[i]);
	if (unshare(CLONE_NEWCGROUP)) die("unshare cgroup");
	b->s->stamp[JOIN] = now();
	char *argv[] = {"true", 0}, *envp[] = {"PATH=/bin", 0};
	execve(program, argv, envp);
	die("exec %s", program);
}

static int make_overlay(struct box *b, int userns) {
	int fs = syscall(SYS_fsopen, "overlay", FSOPEN_CLOEXEC);
	if (fs < 0 || set_string(fs, "source", "floor")) die("fsopen overlay");
	int l[MAX_LAYERS]; /* open until the mount: closed, they are no mounts any more */
	for (int i = n_layers - 1; i >= 0; i--) {
		l[i] = syscall(SYS_open_tree, layers[i], "", OPEN_TREE_CLONE | O_CLOEXEC | AT_EMPTY_PATH);
		struct mount_attr map = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = userns};
		if (l[i] < 0 || syscall(SYS_mount_setattr, l[i], "", AT_EMPTY_PATH, &map, sizeof map)) die("idmap layer");
		if (syscall(SYS_fsconfig, fs, FSCONFIG_SET_FD, "lowerdir+", 0, l[i])) die("lowerdir+ by descriptor");
	}
	char p[PATH + 8];
	snprintf(p, sizeof p, "%s/upper", b->path);
	if (set_string(fs, "upperdir", p)) die("upperdir");
	snprintf(p, sizeof p, "%s/work", b->path);
	if (set_string(fs, "workdir", p)) die("workdir");
	syscall(SYS_fsconfig, fs, FSCONFIG_SET_FLAG, "volatile", 0, 0);
	if (syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, 0, 0, 0)) die_fs(fs, "overlay");
	int fd = syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, 0);
	if (fd < 0) die("fsmount overlay");
	close(fs);
	for (int i = 0; i < n_layers; i++) close(l[i]);
	return fd;
}

static void folder(struct box *b, const char *name, mode_t mode, int owner) {
	char p[PATH + 8];
	snprintf(p, sizeof p, "%s%s", b->path, name);
	if (mkdir(p, mode)) die("mkdir %s", p);
	if (owner >= 0 && chown(p, owner, owner)) die("chown %s", p);
}

static void discard(struct box *b) {
	/* What overlayfs leaves in a folder that nothing was written to. */
	static const char *const left[] = {"/upper", "/work/work/incompat/volatile/dirty", "/work/work/incompat/volatile", "/work/work/incompat", "/work/work", "/work/index", "/work", ""};
	char p[PATH + 64];
	for (unsigned i = 0; i < sizeof left / sizeof *left; i++) {
		snprintf(p, sizeof p, "%s%s", b->path, left[i]);
		if (rmdir(p) && errno != ENOENT) {
			if (errno == ENOTDIR && !unlink(p)) continue;
			die("rmdir %s", p);
		}
	}
}

/* box makes, runs and destroys one. Stamps are in s. */
static void box(struct shared *s, int slot, long serial) {
	struct box b = {.s = s};
	unsigned id = first_id + slot * IDS;
	char p[PATH];
	snprintf(b.name, sizeof b.name, "%d", slot);
	snprintf(b.path, sizeof b.path, "%s/%d", dir, slot);
	s->begin = now();

	make_limits(b.name, serial);
	for (int i = 0; !v2 && i < N_CONTROLLERS; i++) {
		group_path(p, controllers[i], b.name, "tasks");
		if ((b.tasks[i] = open(p, O_WRONLY | O_CLOEXEC)) < 0) die("open %s", p);
	}
	s->stamp[GROUPS] = now();

	folder(&b, "", 0700, -1);
	folder(&b, "/upper", 0755, id);
	folder(&b, "/work", 0700, -1);
	s->stamp[FOLDERS] = now();

	struct clone_args args = {
		.flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_FILES,
		.exit_signal = SIGCHLD,
	};
	if (v2) {
		group_path(p, "", b.name, 0);
		int cg = open(p, O_PATH | O_DIRECTORY | O_CLOEXEC);
		if (cg < 0) die("open %s", p);
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = cg;
	}
	if (pipe2(b.go, O_CLOEXEC)) die("pipe");
	pid_t pid = syscall(SYS_clone3, &args, sizeof args);
	if (pid < 0) die("clone3");
	if (pid == 0) inside(&b);
	if (v2) close(args.cgroup);
	s->stamp[CLONE] = now();

	snprintf(p, sizeof p, "0 %u %d", id, IDS);
	char proc[64];
	snprintf(proc, sizeof proc, "/proc/%d/uid_map", pid);
	put(proc, p);
	snprintf(proc, sizeof proc, "/proc/%d/gid_map", pid);
	put(proc, p);
	s->stamp[MAPS] = now();

	snprintf(proc, sizeof proc, "/proc/%d/ns/user", pid);
	int userns = open(proc, O_RDONLY | O_CLOEXEC);
	if (userns < 0) die("open %s", proc);
	s->root = make_overlay(&b, userns);
	close(userns);
	s->stamp[OVERLAY] = now();

	int status;
	if (write(b.go[1], "", 1) != 1) die("start the box");
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR) die("waitpid");
	s->stamp[EXEC] = now();
	errno = 0;
	if (status != 0) die("box ended with status %#x", status);

	close(s->root);
	close(b.go[0]);
	close(b.go[1]);
	if (v2) remove_group("", b.name);
	for (int i = 0; !v2 && i < N_CONTROLLERS; i++) {
		close(b.tasks[i]);
		remove_group(controllers[i], b.name);
	}
	discard(&b);
	s->stamp[DESTROY] = now();
}

/* ---- modes ---- */

static void *share(size_t size) {
	void *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) die("mmap");
	return p;
}

static void print_box(const struct shared *s) {
	double last = s->begin;
	printf("{");
	for (int i = 0; i < STEPS; i++) {
		printf("\"%s\":%.1f,", names[i], s->stamp[i] - last);
		last = s->stamp[i];
	}
	printf("\"total\":%.1f}\n", s->stamp[EXEC] - s->begin); /* as far as its command's answer */
}

static void boxes_one(long n, long gap) {
	struct shared *s = share(sizeof *s);
	for (long i = 0; i < n; i++) {
		rest(gap);
		box(s, 0, i);
		print_box(s);
	}
}

static void boxes_many(long n, int makers) {
	struct counters { atomic_long taken; } *c = share(sizeof *c);
	double begin = now();
	for (int m = 0; m < makers; m++) {
		pid_t pid = fork();
		if (pid < 0) die("fork");
		if (pid > 0) continue;
		struct shared *s = share(sizeof *s);
		for (long i; (i = atomic_fetch_add(&c->taken, 1)) < n;) box(s, m, i);
		_exit(0);
	}
	for (int status; wait(&status) > 0;) {
		errno = 0;
		if (status) die("a maker ended with status %#x", status);
	}
	printf("{\"n\":%ld,\"seconds\":%.6f}\n", n, (now() - begin) / 1e6);
}

static void spawn(long n, long gap, const char *path) {
	for (long i = 0; i < n; i++) {
		rest(gap);
		double begin = now();
		pid_t pid = fork();
		if (pid < 0) die("fork");
		if (pid == 0) {
			char *argv[] = {"true", 0}, *envp[] = {"PATH=/bin", 0};
			execve(path, argv, envp);
			die("exec %s", path);
		}
		int status;
		if (waitpid(pid, &status, 0) != pid || status) die("%s ended with status %#x", path, status);
		printf("{\"total\":%.1f}\n", now() - begin);
	}
}

static void pipe_speed(char *bytes, const char *path) {
	static char buf[1 << 18];
	int p[2];
	long got = 0, n;
	if (pipe2(p, O_CLOEXEC)) die("pipe");
	double begin = now();
	pid_t pid = fork();
	if (pid < 0) die("fork");
	if (pid == 0) {
		char *argv[] = {"write", bytes, 0}, *envp[] = {0};
		dup2(p[1], 1);
		execve(path, argv, envp);
		die("exec %s", path);
	}
	close(p[1]);
	while ((n = read(p[0], buf, sizeof buf)) > 0) got += n;
	int status;
	waitpid(pid, &status, 0);
	printf("{\"bytes\":%ld,\"seconds\":%.6f}\n", got, (now() - begin) / 1e6);
}

/* ---- what runs in sandboxes ---- */

static int burn(long ms) {
	struct timespec t;
	do clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	while (t.tv_sec * 1000 + t.tv_nsec / 1000000 < ms);
	return 0;
}

static int write_zeros(long n) {
	static char buf[1 << 16];
	while (n > 0) {
		long w = write(1, buf, n < (long)sizeof buf ? n : (long)sizeof buf);
		if (w < 0) return 1;
		n -= w;
	}
	return 0;
}

static int hold(long n) {
	static const char text[] = "what compresses well, as most memory does. ";
	char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) return 1;
	for (long at = 0; at < n / 2;) {
		ssize_t got = getrandom(p + at, n / 2 - at, 0);
		if (got < 0) return 1;
		at += got;
	}
	for (long at = n / 2; at < n; at++) p[at] = text[at % (sizeof text - 1)];
	if (write(1, "ready\n", 6) != 6) return 1;
	for (;;) pause();
}

/* ---- memory taken back ---- */

static long group_number(const char *box, const char *file) {
	char p[PATH], text[64] = "";
	group_path(p, v2 ? "" : "memory", box, file);
	int fd = open(p, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, text, sizeof text - 1) < 0) die("read %s", p);
	close(fd);
	return atol(text);
}

static void reclaims(long n, long bytes) {
	pid_t *holders = calloc(n, sizeof *holders);
	char box[32], p[PATH], text[32];
	open_groups();
	for (long i = 0; i < n; i++) {
		int ready[2];
		snprintf(box, sizeof box, "r%ld", i);
		make_group(v2 ? "" : "memory", box);
		if (!v2) limit("memory", box, "memory.swappiness", "100");
		if (pipe2(ready, O_CLOEXEC)) die("pipe");
		if ((holders[i] = fork()) < 0) die("fork");
		if (!holders[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			group_path(p, v2 ? "" : "memory", box, "cgroup.procs");
			put(p, "0");
			dup2(ready[1], 1);
			_exit(hold(bytes));
		}
		close(ready[1]);
		if (read(ready[0], text, 6) != 6) die("hold %ld bytes", bytes);
		close(ready[0]);
	}
	const char *current = v2 ? "memory.current" : "memory.usage_in_bytes";
	long got = 0;
	double begin = now();
	for (long i = 0; i < n; i++) {
		snprintf(box, sizeof box, "r%ld", i);
		long before = group_number(box, current);
		group_path(p, v2 ? "" : "memory", box, v2 ? "memory.reclaim" : "memory.force_empty");
		snprintf(text, sizeof text, "%ld", v2 ? before : 0);
		int fd = open(p, O_WRONLY | O_CLOEXEC);
		if (fd < 0 || (write(fd, text, strlen(text)) < 0 && errno != EAGAIN && errno != EBUSY)) die("write %s", p);
		close(fd);
		got += before - group_number(box, current);
	}
	printf("{\"bytes\":%ld,\"seconds\":%.6f}\n", got, (now() - begin) / 1e6);
	for (long i = 0; i < n; i++) {
		snprintf(box, sizeof box, "r%ld", i);
		kill(holders[i], SIGKILL);
		waitpid(holders[i], 0, 0);
		remove_group(v2 ? "" : "memory", box);
	}
	close_groups();
}

static int usage(void) {
	fprintf(stderr, "usage: floor [-d DIR -g NAME -l LAYER... -u ID -x PROGRAM] box N GAP | boxes N C | spawn N GAP PROGRAM | pipe BYTES PROGRAM | reclaim N BYTES\n");
	return 2;
}

int main(int argc, char **argv) {
	const char *name = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
	if (!strcmp(name, "true")) return 0;
	if (!strcmp(name, "burn")) return burn(argc > 1 ? atol(argv[1]) : 0);
	if (!strcmp(name, "write")) return write_zeros(argc > 1 ? atol(argv[1]) : 0);
	if (!strcmp(name, "hold")) return hold(argc > 1 ? atol(argv[1]) : 0);
	if (!strcmp(name, "pause"))
		for (;;) pause();

	char *specs[MAX_LAYERS];
	umask(0);
	for (int c; (c = getopt(argc, argv, "+d:g:l:u:x:")) != -1;) switch (c) {
		case 'd': dir = optarg; break;
		case 'g': group = optarg; break;
		case 'u': first_id = strtoul(optarg, 0, 0); break;
		case 'x': program = optarg; break;
		case 'l':
			if (n_layers == MAX_LAYERS) return usage();
			specs[n_layers++] = optarg;
			break;
		default: return usage();
		}
	argc -= optind, argv += optind;
	if (argc == 4 && !strcmp(argv[0], "spawn")) {
		spawn(atol(argv[1]), atol(argv[2]), argv[3]);
		return fflush(stdout) != 0;
	}
	if (argc == 3 && !strcmp(argv[0], "pipe")) {
		pipe_speed(argv[1], argv[2]);
		return fflush(stdout) != 0;
	}
	if (argc == 3 && group && !strcmp(argv[0], "reclaim")) {
		reclaims(atol(argv[1]), atol(argv[2]));
		return fflush(stdout) != 0;
	}
	int one = argc == 3 && !strcmp(argv[0], "box"), many = argc == 3 && !strcmp(argv[0], "boxes");
	if ((!one && !many) || !dir || !group || !n_layers) return usage();

	/* Nothing of the boxes' mounts may reach the host's namespace. A detached
	 * mount can be cloned in the namespace it was made in only: layers come after. */
	if (unshare(CLONE_NEWNS) || mount("", "/", 0, MS_REC | MS_PRIVATE, 0)) die("own mount namespace");
	for (int i = 0; i < n_layers; i++) layers[i] = mount_layer(specs[i]);
	snprintf(at, sizeof at, "%s/at", dir);
	if (mkdir(at, 0755) && errno != EEXIST) die("mkdir %s", at);
	open_groups();
	if (one) boxes_one(atol(argv[1]), atol(argv[2]));
	else boxes_many(atol(argv[1]), atoi(argv[2]));
	close_groups();
	rmdir(at);
	return fflush(stdout) != 0;
}
