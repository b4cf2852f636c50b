"""Safetensors headers: parse, validate, encode.

Pure over bytes; one set of checks for reading and writing.

The rules, each with the number that its error carries (safetensors README, "Format"; where the
reference library 0.8.0 is laxer, the README wins):

F1  the file has 8 bytes: a u64, little-endian, the header's length N
F2  N <= 100,000,000
F3  8 + N <= file size
F4  the header is UTF-8, no byte order mark
F5  it begins with ``{``
F6  after the JSON only spaces
F7  strict JSON, one object
F8  no duplicate keys
F9  ``__metadata__`` maps strings to strings; null, which MLX writes, means no metadata
F10 every other value is an object with dtype, shape, data_offsets; unknown fields are accepted
    and not kept
F11 dtype is a known name
F12 shape: non-negative integers
F13 data_offsets: [begin, end], integers, begin <= end
F14 end - begin = elements * bits / 8, without overflow in 64 bits
F15 sub-byte tensors fill whole bytes
F16 the ranges, sorted, cover the data from 0 without hole or overlap
F17 the last end is the end of the file
F18 any string is a tensor name
F19 empty and rank-0 tensors are legal

The scanner (scan.cpp) reads a header in one pass and accepts it, or declines it without a reason.
Its twin, the parser (`header.parse_strictly`), reads again what the scanner declines, and gives the
verdict and the message. They read equally what both accept.

Offsets in `TensorEntry` count from the start of the data region, as in the file.
"""
