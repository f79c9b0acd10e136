// Frame headers: 48 bytes before every chunk on the wire, little-endian.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeroband {

constexpr size_t HEADER_BYTES = 48;
constexpr size_t LARGEST_PAYLOAD = size_t{16} << 20;

enum FrameKind : uint8_t { PARTIAL = 1, FINAL = 2, PAYLOAD = 3, BEAT = 4 };

// A beat has no payload and no operation: it shows that the path from the sender works and its process runs.

constexpr uint8_t NO_CODEC = 255;  // for payloads, whose bytes are opaque here

// Identifies an operation: a plan of a run's round, on one lane. Plan numbers only grow.
struct Operation {
    uint64_t run;   // hash of the run's id
    uint64_t plan;  // number of the plan, and 16 low bits that tell plans of equal number apart
    uint32_t epoch;
    uint32_t round;
    uint16_t lane;

    bool operator==(const Operation& other) const {
        return run == other.run && plan == other.plan && epoch == other.epoch && round == other.round &&
               lane == other.lane;
    }
    // Whether this operation starts before `other`.
    bool is_before(const Operation& other) const {
        const uint64_t number = plan >> 16, others = other.plan >> 16;
        return number != others ? number < others : lane < other.lane;
    }
};

struct Frame {
    Operation operation;
    FrameKind kind;
    uint8_t codec;
    uint32_t shard;
    uint32_t chunk;
    uint32_t payload_bytes;  // without the authentication tag
};

void write_header(const Frame& frame, uint8_t* out);

// False: not a header of this protocol.
bool read_header(const uint8_t* in, Frame& frame);

}  // namespace zeroband
