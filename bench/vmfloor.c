//go:build ignore

// The agent of a bare virtual machine: what a microVM's guest must do at the
// least, as the first process of an initramfs, with nothing that makes it a
// sandbox. It loads the modules that lie in /modules, in the order of
// their names, and answers lines on the first virtio port it finds:
//
//	ping                       -> ok
//	mount START:SECTORS ...    -> ok      layers on /dev/vda, lowest first
//	unmount                    -> ok
//	exec PROGRAM [ARGUMENT...] -> its wait status, within what is mounted
//	read FILE                  -> bytes that were read of it
//
// With vdax as its first argument the layers are /dev/pmemN instead, mounted
// with dax. An answer that is no number or "ok" says what went wrong.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/blkpg.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char reply[256];
static int layers;

static const char *say(const char *what)
{
	snprintf(reply, sizeof reply, "%s: %s", what, strerror(errno));
	return reply;
}

static void load_modules(void)
{
	struct dirent **names;
	int n = scandir("/modules", &names, NULL, alphasort);
	for (int i = 0; i < n; i++) {
		char path[300];
		if (names[i]->d_name[0] == '.')
			continue;
		snprintf(path, sizeof path, "/modules/%s", names[i]->d_name);
		int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 || syscall(SYS_finit_module, fd, "", 0) < 0)
			dprintf(2, "load %s: %s\n", path, strerror(errno));
		close(fd);
	}
}

static const char *flush(const char *disk)
{
	int fd = open(disk, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return say(disk);
	ioctl(fd, BLKFLSBUF, 0);
	close(fd);
	return NULL;
}

static const char *mount_layer(int i, char *extent)
{
	char source[32], target[32];
	const char *options = NULL;
	unsigned long long start = 0, sectors = 0;
	if (strcmp(extent, "dax") == 0) {
		snprintf(source, sizeof source, "/dev/pmem%d", i);
		options = "dax=always";
	} else {
		struct blkpg_partition p = { .pno = i + 1 };
		struct blkpg_ioctl_arg a = { .op = BLKPG_ADD_PARTITION, .datalen = sizeof p, .data = &p };
		if (sscanf(extent, "%llu:%llu", &start, &sectors) != 2)
			return "bad extent";
		p.start = start * 512;
		p.length = sectors * 512;
		int fd = open("/dev/vda", O_RDONLY | O_CLOEXEC);
		if (fd < 0 || ioctl(fd, BLKPG, &a) < 0)
			return say("partition");
		close(fd);
		snprintf(source, sizeof source, "/dev/vda%d", i + 1);
	}
	snprintf(target, sizeof target, "/layers/%d", i);
	mkdir("/layers", 0755);
	mkdir(target, 0755);
	if (mount(source, target, "erofs", MS_RDONLY, options) < 0)
		return say("mount layer");
	return NULL;
}

static const char *mount_all(char *extents)
{
	char lower[3000] = "", options[3200];
	const char *bad;
	if ((bad = flush("/dev/vda")) || (bad = flush("/dev/vdb")))
		return bad;
	layers = 0;
	for (char *e = strtok(extents, " "); e; e = strtok(NULL, " ")) {
		char one[32], all[3000];
		if ((bad = mount_layer(layers, e)))
			return bad;
		snprintf(one, sizeof one, "/layers/%d", layers++);
		snprintf(all, sizeof all, "%s%s%.2900s", one, *lower ? ":" : "", lower);
		strcpy(lower, all);
	}
	mkdir("/disk", 0755);
	mkdir("/root", 0755);
	if (mount("/dev/vdb", "/disk", "ext4", 0, NULL) < 0)
		return say("mount disk");
	mkdir("/disk/upper", 0755);
	mkdir("/disk/work", 0755);
	snprintf(options, sizeof options, "lowerdir=%s,upperdir=/disk/upper,workdir=/disk/work,volatile", lower);
	if (mount("overlay", "/root", "overlay", 0, options) < 0)
		return say("mount root");
	return "ok";
}

static const char *unmount_all(void)
{
	if (umount("/root") < 0 || umount("/disk") < 0)
		return say("unmount");
	for (int i = 0; i < layers; i++) {
		char target[32];
		struct blkpg_partition p = { .pno = i + 1 };
		struct blkpg_ioctl_arg a = { .op = BLKPG_DEL_PARTITION, .datalen = sizeof p, .data = &p };
		snprintf(target, sizeof target, "/layers/%d", i);
		if (umount(target) < 0)
			return say("unmount layer");
		int fd = open("/dev/vda", O_RDONLY | O_CLOEXEC);
		ioctl(fd, BLKPG, &a);
		close(fd);
	}
	const char *bad;
	if ((bad = flush("/dev/vda")) || (bad = flush("/dev/vdb")))
		return bad;
	return "ok";
}

static const char *execute(char *line)
{
	char *argv[32];
	int n = 0, status;
	for (char *w = strtok(line, " "); w && n < 31; w = strtok(NULL, " "))
		argv[n++] = w;
	argv[n] = NULL;
	pid_t pid = vfork();
	if (pid == 0) {
		if (chroot("/root") == 0 && chdir("/") == 0)
			execv(argv[0], argv);
		_exit(errno);
	}
	if (pid < 0 || waitpid(pid, &status, 0) < 0)
		return say("exec");
	snprintf(reply, sizeof reply, "%d", status);
	return reply;
}

static const char *read_file(const char *name)
{
	static char buffer[1 << 18];
	char path[300];
	long long total = 0;
	ssize_t n;
	snprintf(path, sizeof path, "/root/%s", name);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return say(path);
	while ((n = read(fd, buffer, sizeof buffer)) > 0)
		total += n;
	close(fd);
	snprintf(reply, sizeof reply, "%lld", total);
	return reply;
}

static const char *answer(char *line)
{
	if (strcmp(line, "ping") == 0)
		return "ok";
	if (strncmp(line, "mount ", 6) == 0)
		return mount_all(line + 6);
	if (strcmp(line, "unmount") == 0)
		return unmount_all();
	if (strncmp(line, "exec ", 5) == 0)
		return execute(line + 5);
	if (strncmp(line, "read ", 5) == 0)
		return read_file(line + 5);
	return "what?";
}

static int open_port(void)
{
	for (;;) {
		for (int i = 0; i < 4; i++) {
			char path[32];
			snprintf(path, sizeof path, "/dev/vport%dp1", i);
			int fd = open(path, O_RDWR | O_CLOEXEC);
			if (fd >= 0)
				return fd;
		}
		usleep(1000);
	}
}

int main(void)
{
	static char line[4096];
	size_t have = 0;
	mkdir("/proc", 0755);
	mkdir("/dev", 0755);
	mount("proc", "/proc", "proc", 0, NULL);
	mount("dev", "/dev", "devtmpfs", 0, NULL);
	load_modules();
	int port = open_port();
	for (;;) {
		ssize_t n = read(port, line + have, sizeof line - 1 - have);
		if (n <= 0) { // nobody is at the other end
			usleep(1000);
			continue;
		}
		have += n;
		char *end;
		line[have] = 0;
		while ((end = strchr(line, '\n'))) {
			*end = 0;
			const char *a = answer(line);
			dprintf(port, "%s\n", a);
			have -= end + 1 - line;
			memmove(line, end + 1, have + 1);
		}
		if (have == sizeof line - 1)
			have = 0;
	}
}
