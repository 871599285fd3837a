"""Runs several short tasks one after another in one process (`--cluster`). It reads them as JSON on standard input, and
reports on descriptor 3 how each ended. A separate program, which imports little: `python -I -S cluster.py`."""

import json
import os
import signal
import sys
import time

RESULTS = 3


def main() -> int:
    jobs = json.loads(sys.stdin.buffer.read())
    inherited = dict(os.environ)
    devnull = os.open(os.devnull, os.O_RDONLY)
    for number, job in enumerate(jobs):
        began_ns = time.time_ns()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        out, err = (os.open(path, flags, 0o666) for path in (job["out"], job["err"]))
        try:
            pid = os.posix_spawnp(
                job["words"][0],
                job["words"],
                {**inherited, **job["environment"]},
                file_actions=[(os.POSIX_SPAWN_DUP2, ours, its) for ours, its in ((devnull, 0), (out, 1), (err, 2))]
                + [(os.POSIX_SPAWN_CLOSE, RESULTS)],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT],
            )
        except OSError as error:
            os.write(err, f"{job['words'][0]}: {error.strerror}\n".encode(errors="surrogateescape"))
            code, cpu_s, memory_bytes = 127 if isinstance(error, FileNotFoundError) else 126, 0.0, 0
        else:
            _, status, usage = os.wait4(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
            cpu_s, memory_bytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
        for path, log in ((job["out"], out), (job["err"], err)):
            if os.fstat(log).st_size == 0 and code == 0:
                os.unlink(path)
            os.close(log)
        result = json.dumps([number, code, began_ns, time.time_ns(), cpu_s, memory_bytes]) + "\n"
        os.write(RESULTS, result.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
