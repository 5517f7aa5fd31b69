"""Files are opened without waiting, and read whole only up to a size."""

import os
import socket
from pathlib import Path

import pytest

from penstock.io.files import (
    MOST_BYTES,
    MOST_LINE_BYTES,
    UnfitFileError,
    check_file,
    check_texts,
    lines_of,
    open_file,
    read_bytes,
    read_text,
)


def test_a_regular_file_is_read_whole_and_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"one\r\n\ntwo")
    assert read_bytes(path) == b"one\r\n\ntwo" and read_text(path) == "one\n\ntwo"
    assert list(lines_of(path)) == [b"one\r\n", b"\n", b"two"]
    (tmp_path / "link").symlink_to(path)
    assert read_bytes(tmp_path / "link") == read_bytes(path)


@pytest.mark.parametrize("read", [open_file, read_bytes, lambda path: next(lines_of(path)), check_file])
def test_pipes_sockets_and_devices_are_refused_at_once(read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path in ("pipe", "/dev/zero", "/dev/null"):
            with pytest.raises(UnfitFileError, match=f"^{path} is no regular file$"):
                read(path)
        with pytest.raises(OSError, match="socket"):
            read("socket")


def test_folders_and_missing_files_are_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")


def test_large_files_and_long_lines_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.touch()
    os.truncate(path, MOST_BYTES + 1)
    for read in (read_bytes, check_file, lambda path: check_texts(path.parent)):
        with pytest.raises(UnfitFileError, match="larger than the 256 MiB that are read"):
            read(path)
    check_file(path.rename(tmp_path / "a.safetensors"))
    path.write_bytes(b"short\n")
    os.truncate(path, MOST_LINE_BYTES + 6)
    assert [len(line) for line in lines_of(path)] == [6, MOST_LINE_BYTES]
    os.truncate(path, MOST_LINE_BYTES + 7)
    with pytest.raises(UnfitFileError, match="a line has more than 64 MiB"):
        list(lines_of(path))


def test_a_pipe_that_the_process_was_given_open_is_read() -> None:
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as file:
            file.write(b"a\nb\n")
        assert list(lines_of(f"/dev/fd/{reading}")) == [b"a\n", b"b\n"]
    finally:
        os.close(reading)


def test_a_mark_of_the_byte_order_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n')
    assert list(lines_of(path)) == [b'{"text": "a"}\n', b'{"text": "b"}\n']
    assert read_text(path) == '{"text": "a"}\n{"text": "b"}\n'
    path.write_bytes(b"{}")
    assert list(lines_of(path)) == [b"{}"] and read_text(path) == "{}"
