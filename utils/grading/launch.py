"""Starts a kernel without letting it see its connection file.

Jupyter runs this outside of the kernel's sandbox: ``launch.py FILE COMMAND…``. The file names the
kernel's ports and the key with which anyone could run code in it, so it is deleted at once; the
command gets its content on standard input.

Run as a file, with ``-I -S``: it imports nothing that is slow.
"""

import os
import sys


def main(path: str, *command: str) -> None:
    """Become the command, with the file's content as standard input."""
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    reading, writing = os.pipe()
    os.write(writing, content)  # a pipe takes 64 kB without a reader
    os.close(writing)
    os.dup2(reading, 0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
