// Python's strings of scanned ones.
#pragma once

#include <nanobind/nanobind.h>

#include "json_scanner.h"

namespace blobstore {

// A string of the text. Bytes that are not UTF-8 raise ValueError, as `unescape` does for half of a
// surrogate pair.
inline nanobind::object text_of(const String& found, const nanobind::callable& unescape) {
  namespace nb = nanobind;
  if (found.escaped) return unescape(nb::bytes(found.raw.data() - 1, found.raw.size() + 2));
  const auto size = static_cast<Py_ssize_t>(found.raw.size());
  nb::object decoded = nb::steal(PyUnicode_DecodeUTF8(found.raw.data(), size, "strict"));
  if (!decoded) nb::raise_python_error();
  return decoded;
}

}  // namespace blobstore
