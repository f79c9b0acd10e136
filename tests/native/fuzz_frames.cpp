// Bytes of a stranger who knows the key: the frame reader and the operation behind it take anything without harm.
//
// With clang: -fsanitize=fuzzer,address. Without: a main of its own mutates what an honest member would send.

#include "stream.h"
#include "support.h"

using namespace zeroband;

namespace {

constexpr uint32_t PEER = 1;
constexpr uint64_t NUMEL = 5003;

const Case SITES = {4, NUMEL, FP32, false, false, 1, 1, 2};

enum Kind : unsigned { ALL_TO_ALL = 0, RING = 1, GATHER = 2, KINDS = 3 };

// A member of an operation of this kind: of two members, and of two sites of two where payloads are gathered.
std::unique_ptr<Transfer> operation_of(Kind kind, uint32_t self, float* in, float* out) {
    const auto pool = std::make_shared<PacketPool>();
    if (kind == GATHER)
        return std::make_unique<Gather>(gather_of(SITES, self, 1, bytes_of(in), bytes_of(out)), pool);
    return std::make_unique<Reduce>(spec_of({2, NUMEL, INT8, kind == RING, false}, self, 1, in, out), pool);
}

struct Target {
    explicit Target(Kind kind) : in(NUMEL, 1.0f), out(4 * NUMEL), transfer(operation_of(kind, 0, in.data(), out.data())) {
        transfer->begin();
    }

    // False: the stream would be closed.
    bool feed(const uint8_t* data, size_t size) {
        FrameReader reader(pool, nullptr);
        const FrameReader::Sink sink = {
            [this](const Frame& frame) {
                using Verdict = FrameReader::Verdict;
                if (!(frame.operation == transfer->operation()))
                    return frame.operation.run == 7 ? Verdict::SKIP : Verdict::REFUSE;
                return transfer->expects(PEER, frame) ? Verdict::TAKE : Verdict::REFUSE;
            },
            [this](PacketPtr packet) {
                std::vector<uint32_t> awakened;
                transfer->receive(PEER, std::move(packet), awakened);
            }};
        while (size > 0) {
            const FrameReader::Room room = reader.room();
            const size_t step = std::min(size, size_t{1} + data[0] * size_t{37} % 4000);
            const size_t first = std::min(step, room.bytes), second = std::min(step - first, room.more_bytes);
            std::memcpy(room.at, data, first);
            if (second > 0) std::memcpy(room.more, data + first, second);
            if (!reader.filled(first + second, sink)) return false;
            data += first + second;
            size -= first + second;
        }
        return true;
    }

    std::vector<float> in, out;
    const std::shared_ptr<PacketPool> pool = std::make_shared<PacketPool>();
    const std::unique_ptr<Transfer> transfer;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    Target target(static_cast<Kind>(data[0] % KINDS));
    target.feed(data + 1, size - 1);
    return 0;
}

#ifndef ZEROBAND_LIBFUZZER

namespace {

// What the other member would send if it spoke alone.
std::vector<uint8_t> honest(Kind kind) {
    std::vector<float> in(NUMEL, 0.5f), out(4 * NUMEL), away(4 * NUMEL);
    const auto transfer = operation_of(kind, PEER, in.data(), out.data());
    transfer->begin();
    if (kind == GATHER) {  // what it passes on, besides its own
        constexpr uint32_t AWAY = 3;
        const auto other = operation_of(kind, AWAY, in.data(), away.data());
        std::vector<uint32_t> awakened;
        while (PacketPtr packet = other->next(PEER)) transfer->receive(AWAY, std::move(packet), awakened);
    }
    std::vector<uint8_t> sent;
    while (PacketPtr packet = transfer->next(0))
        sent.insert(sent.end(), packet->header(), packet->payload() + packet->frame.payload_bytes);
    return sent;
}

std::vector<uint8_t> mutated(std::vector<uint8_t> bytes, std::mt19937& random) {
    for (unsigned change = random() % 4; change > 0 && !bytes.empty(); --change) {
        const size_t at = random() % 3 == 0 ? random() % bytes.size() : random() % std::min<size_t>(bytes.size(), 48);
        switch (random() % 5) {
            case 0: bytes[at] = static_cast<uint8_t>(random()); break;
            case 1: bytes[at] ^= static_cast<uint8_t>(1u << (random() % 8)); break;
            case 2: bytes.resize(at); break;
            case 3: bytes.erase(bytes.begin() + static_cast<long>(at)); break;
            default: bytes.insert(bytes.end(), bytes.begin(), bytes.begin() + static_cast<long>(at)); break;
        }
    }
    return bytes;
}

}  // namespace

int main(int argc, char** argv) {
    const long rounds = argc > 1 ? std::atol(argv[1]) : 20000;
    std::mt19937 random(1);
    std::vector<std::vector<uint8_t>> seeds;
    for (const Kind kind : {ALL_TO_ALL, RING, GATHER}) {
        seeds.push_back(honest(kind));
        REQUIRE(Target(kind).feed(seeds[kind].data(), seeds[kind].size()));
    }
    REQUIRE(seeds[GATHER].size() > 8 * NUMEL - 6000);  // both payloads
    for (long round = 0; round < rounds; ++round) {
        const size_t kind = random() % KINDS;
        std::vector<uint8_t> bytes{static_cast<uint8_t>(kind)};
        const std::vector<uint8_t> tail = mutated(seeds[kind], random);
        bytes.insert(bytes.end(), tail.begin(), tail.end());
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::puts("ok");
}

#endif
