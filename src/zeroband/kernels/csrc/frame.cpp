#include "frame.h"

#include <cstring>

namespace zeroband {
namespace {

constexpr uint32_t MAGIC = 0x3142'5a02;  // protocol 2

template <typename Value>
void put(uint8_t*& at, Value value) {
    for (size_t i = 0; i < sizeof(Value); ++i) *at++ = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
}

template <typename Value>
Value take(const uint8_t*& at) {
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(Value); ++i) value |= static_cast<uint64_t>(*at++) << (8 * i);
    return static_cast<Value>(value);
}

}  // namespace

void write_header(const Frame& frame, uint8_t* out) {
    std::memset(out, 0, HEADER_BYTES);
    put<uint32_t>(out, MAGIC);
    put<uint8_t>(out, frame.kind);
    put<uint8_t>(out, frame.codec);
    put<uint16_t>(out, frame.operation.lane);
    put<uint64_t>(out, frame.operation.run);
    put<uint64_t>(out, frame.operation.plan);
    put<uint32_t>(out, frame.operation.epoch);
    put<uint32_t>(out, frame.operation.round);
    put<uint32_t>(out, frame.shard);
    put<uint32_t>(out, frame.chunk);
    put<uint32_t>(out, frame.payload_bytes);
}

bool read_header(const uint8_t* in, Frame& frame) {
    if (take<uint32_t>(in) != MAGIC) return false;
    const uint8_t kind = take<uint8_t>(in);
    frame.kind = static_cast<FrameKind>(kind);
    frame.codec = take<uint8_t>(in);
    frame.operation.lane = take<uint16_t>(in);
    frame.operation.run = take<uint64_t>(in);
    frame.operation.plan = take<uint64_t>(in);
    frame.operation.epoch = take<uint32_t>(in);
    frame.operation.round = take<uint32_t>(in);
    frame.shard = take<uint32_t>(in);
    frame.chunk = take<uint32_t>(in);
    frame.payload_bytes = take<uint32_t>(in);
    return kind >= PARTIAL && kind <= BEAT && (frame.payload_bytes == 0) == (kind == BEAT) &&
           frame.payload_bytes <= LARGEST_PAYLOAD;
}

}  // namespace zeroband
