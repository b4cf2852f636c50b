// Python bindings of SHA-256. The interpreter lock is released meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "choice.h"

namespace nb = nanobind;
using namespace blobstore::hashing;

namespace {

Choice active{};  // changed only while the interpreter lock is held

// The bytes of any object with the buffer protocol.
class Bytes {
 public:
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Bytes(Bytes&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  Bytes& operator=(Bytes&&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }  // does nothing if it has no object

  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

void store_big_endian(std::uint8_t* to, std::uint64_t value, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) {
    to[i] = static_cast<std::uint8_t>(value >> 8 * (size - 1 - i));
  }
}

std::uint64_t load_big_endian(const std::uint8_t* from, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i) value = value << 8 | from[i];
  return value;
}

// One stream: the state after its whole blocks, and the bytes that do not yet make one.
struct Stream {
  std::uint32_t state[8];
  std::uint64_t length = 0;
  std::uint8_t rest[2 * block_size];  // with room for the padding
  bool is_busy = false;               // while a thread hashes without the interpreter lock

  Stream() { std::memcpy(state, initial_state, sizeof state); }
  std::size_t rest_size() const { return length % block_size; }
};

// Makes streams busy, and free again at its end.
class Busy {
 public:
  explicit Busy(const std::vector<Stream*>& streams) : streams_(streams) {
    for (Stream* stream : streams) {
      if (stream->is_busy) {
        free(taken_);
        throw std::runtime_error("the stream is already being hashed");
      }
      stream->is_busy = true;
      ++taken_;
    }
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  ~Busy() { free(taken_); }

 private:
  void free(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) streams_[i]->is_busy = false;
  }
  const std::vector<Stream*>& streams_;
  std::size_t taken_ = 0;
};

struct Piece {
  const std::uint8_t* data;
  std::size_t size;
};

// Adds a piece to each stream: the blocks that it completes first, then its own.
void add_pieces(const Choice& choice, const std::vector<Stream*>& streams,
                std::vector<Piece> pieces) {
  std::vector<Run> completed, whole;
  for (std::size_t i = 0; i < streams.size(); ++i) {
    Stream& stream = *streams[i];
    Piece& piece = pieces[i];
    const std::size_t rest = stream.rest_size();
    if (rest == 0) continue;
    const std::size_t taken = std::min(piece.size, block_size - rest);
    if (taken > 0) std::memcpy(stream.rest + rest, piece.data, taken);
    stream.length += taken;
    piece = {piece.data + taken, piece.size - taken};
    if (rest + taken == block_size) completed.push_back({stream.state, stream.rest, 1});
  }
  hash_runs(choice, std::move(completed));
  for (std::size_t i = 0; i < streams.size(); ++i) {
    whole.push_back({streams[i]->state, pieces[i].data, pieces[i].size / block_size});
  }
  hash_runs(choice, std::move(whole));
  for (std::size_t i = 0; i < streams.size(); ++i) {
    const std::size_t rest = pieces[i].size % block_size;
    if (rest > 0) std::memcpy(streams[i]->rest, pieces[i].data + pieces[i].size - rest, rest);
    streams[i]->length += pieces[i].size;
  }
}

// Pads each stream (FIPS 180-4, section 5.1.1) and hashes what is left of it.
void finish(const Choice& choice, const std::vector<Stream*>& streams) {
  std::vector<Run> runs;
  for (Stream* stream : streams) {
    const std::size_t rest = stream->rest_size();
    const std::size_t blocks = rest + 9 <= block_size ? 1 : 2;
    std::memset(stream->rest + rest, 0, blocks * block_size - rest);
    stream->rest[rest] = 0x80;
    store_big_endian(stream->rest + blocks * block_size - 8, stream->length * 8, 8);
    runs.push_back({stream->state, stream->rest, blocks});
  }
  hash_runs(choice, std::move(runs));
}

nb::bytes digest_of(const Stream& finished) {
  std::uint8_t digest[32];
  for (std::size_t i = 0; i < 8; ++i) store_big_endian(digest + 4 * i, finished.state[i], 4);
  return nb::bytes(digest, sizeof digest);
}

nb::bytes digest(const Stream& stream) {
  if (stream.is_busy) throw std::runtime_error("the stream is being hashed");
  Stream copy = stream;
  finish(active, {&copy});
  return digest_of(copy);
}

// The eight words of the state, the length in bytes, and the bytes that make no whole block.
nb::bytes exported(const Stream& stream) {
  if (stream.is_busy) throw std::runtime_error("the stream is being hashed");
  std::uint8_t raw[40 + block_size];
  for (std::size_t i = 0; i < 8; ++i) store_big_endian(raw + 4 * i, stream.state[i], 4);
  store_big_endian(raw + 32, stream.length, 8);
  std::memcpy(raw + 40, stream.rest, stream.rest_size());
  return nb::bytes(raw, 40 + stream.rest_size());
}

Stream imported(nb::handle object) {
  const Bytes raw(object);
  Stream stream;
  if (raw.size() >= 40) stream.length = load_big_endian(raw.data() + 32, 8);
  if (raw.size() < 40 || raw.size() != 40 + stream.rest_size()) {
    throw std::invalid_argument("the state of a stream has another length");
  }
  for (std::size_t i = 0; i < 8; ++i) {
    stream.state[i] = static_cast<std::uint32_t>(load_big_endian(raw.data() + 4 * i, 4));
  }
  std::memcpy(stream.rest, raw.data() + 40, stream.rest_size());
  return stream;
}

std::vector<Bytes> all_bytes(nb::list objects) {
  std::vector<Bytes> found;
  found.reserve(objects.size());
  for (nb::handle object : objects) found.emplace_back(object);
  return found;
}

std::vector<Piece> pieces_of(const std::vector<Bytes>& all) {
  std::vector<Piece> pieces;
  pieces.reserve(all.size());
  for (const Bytes& bytes : all) pieces.push_back({bytes.data(), bytes.size()});
  return pieces;
}

void update_all(nb::list streams, nb::list objects) {
  if (streams.size() != objects.size()) {
    throw std::invalid_argument("as many pieces as streams are needed");
  }
  const nb::tuple held(streams);  // others may change the list meanwhile
  std::vector<Stream*> taken;
  taken.reserve(held.size());
  for (nb::handle stream : held) taken.push_back(&nb::cast<Stream&>(stream));
  const std::vector<Bytes> all = all_bytes(objects);
  const Busy busy(taken);
  const Choice choice = active;
  const nb::gil_scoped_release unlocked;
  add_pieces(choice, taken, pieces_of(all));
}

void update(Stream& stream, nb::handle object) {
  const Bytes bytes(object);
  const std::vector<Stream*> taken{&stream};
  const Busy busy(taken);
  const Choice choice = active;
  const nb::gil_scoped_release unlocked;
  add_pieces(choice, taken, {{bytes.data(), bytes.size()}});
}

nb::list digests(nb::list objects) {
  const std::vector<Bytes> all = all_bytes(objects);
  std::vector<Stream> streams(all.size());
  std::vector<Stream*> taken;
  taken.reserve(streams.size());
  for (Stream& stream : streams) taken.push_back(&stream);
  const Choice choice = active;
  {
    const nb::gil_scoped_release unlocked;
    add_pieces(choice, taken, pieces_of(all));
    finish(choice, taken);
  }
  nb::list found;
  for (const Stream& stream : streams) found.append(digest_of(stream));
  return found;
}

// The names of the families that this processor has.
std::vector<std::string> families() {
  std::vector<std::string> names;
  for (const Method* method : methods_here()) {
    if (names.empty() || names.back() != method->name) names.emplace_back(method->name);
  }
  return names;
}

// Uses the fastest of the methods, for each number of streams, whose families are named.
void use(const std::vector<std::string>& names) {
  std::vector<const Method*> methods;
  for (const Method* method : methods_here()) {
    if (std::find(names.begin(), names.end(), method->name) != names.end()) {
      methods.push_back(method);
    }
  }
  if (methods.empty()) throw std::invalid_argument("this processor has none of them");
  active = fastest(methods);
}

// (family, streams at once) of the methods in use, for one stream and for many.
std::vector<std::pair<std::string, std::size_t>> in_use() {
  std::vector<std::pair<std::string, std::size_t>> found;
  for (const Method* method : {active.best[0], active.best[max_width - 1]}) {
    found.emplace_back(method->name, method->width);
  }
  return found;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // of all modules: what lives until a command ends is no leak
  use(families());
  nb::class_<Stream>(m, "Sha256", "One stream of SHA-256. One thread uses it at a time.")
      .def(nb::init<>())
      .def("update", &update, "Add bytes, of any object with the buffer protocol.")
      .def("digest", &digest, "Return the digest of all bytes so far, 32 bytes.")
      .def("state", &exported,
           "Return all that `resumed` needs to go on, 40 to 103 bytes: the eight words of the "
           "state and the number of bytes, big-endian, and the bytes that make no block of 64.")
      .def_static("resumed", &imported,
                  "Return the stream that had this state. Raises: ValueError for another length.");
  m.def("update_all", &update_all);
  m.def("digests", &digests);
  m.def("families", &families);
  m.def("use", &use);
  m.def("in_use", &in_use);
}
