# The warm interpreter: imports the modules that it is given, then forks itself
# into a cell for each call. It never runs a call's code; only the forks do.
# The protocol is that of guest/warm.go. Nothing here may need more than
# Python 3.6 and its standard library.
import sys


def main():
    import array, ctypes, gc, os, socket, struct

    for name in sys.argv[1:]:
        __import__(name)
    import atexit, io, random, threading, traceback, types  # what nearly every program has

    libc = ctypes.CDLL(None, use_errno=True)
    setns, prctl, capset = libc.setns, libc.prctl, libc.capset
    header = struct.Struct("<I")
    no_caps_header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0), 8)
    no_caps = ctypes.create_string_buffer(24)
    # CLONE_NEW*: the pid namespace is entered before the fork, the others after.
    PID, REST = 0x20000000, (0x00020000, 0x40000000, 0x08000000)
    control = socket.socket(fileno=3)

    def receive():
        size = array.array("i")
        data, ancillary, _, _ = control.recvmsg(65536, socket.CMSG_SPACE(32 * size.itemsize), socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                size.frombytes(payload[: len(payload) - len(payload) % size.itemsize])
        if not data:
            os._exit(0)
        while len(data) < 4 or len(data) < 4 + header.unpack_from(data)[0]:
            more = control.recv(1 << 20)
            if not more:
                os._exit(0)
            data += more
        fields, at = [], 4
        while at < len(data):
            (n,) = header.unpack_from(data, at)
            fields.append(data[at + 4 : at + 4 + n])
            at += 4 + n
        return fields, list(size)

    def enter(fields, fds):
        """Make this fork a process of its cell: groups, namespaces, streams, user, and no capability."""
        for fd in fds[7:]:
            os.write(fd, b"0")
        for fd, kind in zip(fds[1:4], REST):
            if setns(fd, kind) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        for i in (0, 1, 2):
            os.dup2(fds[4 + i], i)
        os.closerange(3, max(fds) + 1)
        os.setsid()
        os.chdir(os.fsdecode(fields[1]))
        ids = [int(x) for x in fields[0].split()]
        os.setgroups(ids[2:])
        os.setresgid(ids[1], ids[1], ids[1])
        os.setresuid(ids[0], ids[0], ids[0])
        if capset(no_caps_header, no_caps) != 0:
            raise OSError(ctypes.get_errno(), "capset")
        if prctl(4, 1, 0, 0, 0) != 0:  # PR_SET_DUMPABLE, which the change of user took
            raise OSError(ctypes.get_errno(), "prctl")

    sys.argv[:] = [""]
    if sys.path and sys.path[0] == "":
        del sys.path[0]
    gc.collect()
    if hasattr(gc, "freeze"):
        gc.freeze()  # what is here is never looked at again, so it stays shared
    control.sendall(b"ready\n")
    while True:
        fields, fds = receive()
        pid = -1
        try:
            if setns(fds[0], PID) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            pid = os.fork()
        except OSError as e:
            for fd in fds:
                os.close(fd)
            control.sendall(b"error %s\n" % str(e).replace("\n", " ").encode())
            continue
        if pid == 0:
            break
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        control.sendall(b"ok %d\n" % status)

    control.detach()
    try:
        enter(fields, fds)
    except BaseException as e:
        os.write(2, ("enter cell: %s\n" % e).encode())
        os._exit(125)
    argc = int(fields[2])
    argv = [os.fsdecode(f) for f in fields[3 : 3 + argc]]
    environ = os.environ
    environ.clear()
    for pair in fields[3 + argc :]:
        name, _, value = pair.partition(b"=")
        os.environb[name] = value
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed()  # that of the standard library is new in every fork
    run(argv, os, sys, gc, atexit, threading, traceback, types)


def run(argv, os, sys, gc, atexit, threading, traceback, types):
    """Run the program argv[0] as python3 does, and end."""
    path = argv[0]
    sys.argv[:] = argv
    sys.path.insert(0, os.path.dirname(path))
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__, module.__cached__ = path, sys.modules["builtins"], None
    module.__loader__ = None
    status = 0
    try:
        with open(path, "rb") as f:
            source = f.read()
        sys.modules["__main__"] = module
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as e:
        status = e.code
        if status is None:
            status = 0
        elif not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as e:
        status = 1
        skip = e.__traceback__
        while skip is not None and skip.tb_frame.f_code.co_filename == __file__name:
            skip = skip.tb_next  # our own frames are not the program's
        sys.excepthook(type(e), e.with_traceback(skip), skip)
        del e, skip
    try:
        threading._shutdown()
    except BaseException:
        traceback.print_exc()
    try:
        atexit._run_exitfuncs()
    except BaseException:
        status = status or 1
    # What a module's end would flush: open files that only its names hold.
    module.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            status = status or 120
    os._exit(status & 0xFF)


__file__name = main.__code__.co_filename
main()
