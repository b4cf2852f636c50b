// Headers of many small files of one folder, without Python.
#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scan.h"

namespace blobstore {

constexpr std::uint64_t most_header_bytes = 1 << 20;  // of a header; longer ones are read alone
constexpr std::uint64_t most_long_bytes = 64 << 20;   // of all those that are longer than a page

// The name of a file in a folder, and how many bytes it has to have.
using File = std::pair<std::string, std::uint64_t>;

// A header's text and what it says: `scan` points into `text`.
struct FileHeader {
  std::string_view text;
  Scan scan;

  // The length of the text without its padding.
  std::size_t unpadded() const { return text.rfind('}') + 1; }
};

// The headers of several files; null where there is none.
//
// All that belongs to a header is in memory of the thread that read it, and is given back with the
// last header, without destructors: threads would wait for each other if each part were allocated.
struct FileHeaders {
  FileHeaders() = default;
  FileHeaders(FileHeaders&&) = default;
  FileHeaders(const FileHeaders&) = delete;

  std::vector<const FileHeader*> each;
  std::vector<std::unique_ptr<std::pmr::monotonic_buffer_resource>> memory;
};

// The headers of files in the folder that `folder` has open. Null for a file that is missing, a
// link, not a regular file or of another size, for a header that `scan` declines, and for one
// beyond these limits. Opening follows no link and never blocks. Several threads read many files.
FileHeaders headers_in(int folder, const std::vector<File>& files);

}  // namespace blobstore
