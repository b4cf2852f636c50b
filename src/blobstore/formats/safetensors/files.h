// Headers of many small files of one folder, without Python.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scan.h"

namespace blobstore {

constexpr std::size_t most_head_bytes = 4096;  // headers of most blobs end within a page

// The name of a file in a folder, and how many bytes it has to have.
using File = std::pair<std::string, std::uint64_t>;

// A header's text, and what it says: `scan` lies in `text`.
struct FileHeader {
  std::string text;
  Scan scan;
};

// The headers of files in the folder that `folder` has open. Null for a file that is missing, a
// link, not a regular file or of another size, and for a header that does not end in the file's
// first page or that `scan` declines. Opening follows no link and never blocks.
std::vector<std::unique_ptr<FileHeader>> headers_in(int folder, const std::vector<File>& files);

}  // namespace blobstore
