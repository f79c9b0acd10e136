// Sealing: AES-256-GCM of one direction of one stream, by the OpenSSL that the machine has, found at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeroband {

constexpr size_t KEY_BYTES = 32;
constexpr size_t TAG_BYTES = 16;

// Loads libcrypto once. Null where it is there; else why it is not.
const char* sealing_problem();

// One direction of one stream: the nonce is the number of the call, so what is repeated, left out or moved does not
// open. Not for several threads at once.
class Sealer {
  public:
    Sealer(const uint8_t* key, bool seals);
    ~Sealer();
    Sealer(const Sealer&) = delete;
    Sealer& operator=(const Sealer&) = delete;

    // Writes n bytes and their tag to `out`, which may be `in`. `header` is covered by the tag, also where n is 0.
    bool seal(const uint8_t* header, size_t header_bytes, const uint8_t* in, size_t n, uint8_t* out);

    // Opens n bytes that are followed by their tag, in place. False: not what the other end sealed.
    bool open(const uint8_t* header, size_t header_bytes, uint8_t* data, size_t n);

  private:
    bool start(const uint8_t* header, size_t header_bytes);

    void* context_;
    bool seals_;
    uint64_t number_ = 0;
};

}  // namespace zeroband
