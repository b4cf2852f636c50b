// Headers of many small files of one folder, without Python.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scan.h"

namespace blobstore {

constexpr std::uint64_t most_header_bytes = 1 << 20;  // of a header; longer ones are read alone
constexpr std::uint64_t most_long_bytes = 64 << 20;   // of all those that are longer than a page

// The name of a file in a folder, and how many bytes it has to have.
using File = std::pair<std::string, std::uint64_t>;

// A header's text, and what it says: `scan` lies in `text`.
struct FileHeader {
  std::string text;
  Scan scan;

  // The length of the text without its padding.
  std::size_t unpadded() const { return text.rfind('}') + 1; }
};

// The headers of several files; null where there is none.
struct FileHeaders {
  FileHeaders() = default;
  FileHeaders(FileHeaders&&) = default;
  FileHeaders(const FileHeaders&) = delete;

  std::vector<std::unique_ptr<FileHeader>> each;
};

// The headers of files in the folder that `folder` has open. Null for a file that is missing, a
// link, not a regular file or of another size, for a header that `scan` declines, and for one
// beyond these limits. Opening follows no link and never blocks. Several threads read many files.
FileHeaders headers_in(int folder, const std::vector<File>& files);

}  // namespace blobstore
