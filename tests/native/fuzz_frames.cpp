// Bytes of a stranger who knows the key: the frame reader and the reduction behind it take anything without harm.
//
// With clang: -fsanitize=fuzzer,address. Without: a main of its own mutates what an honest member would send.

#include "stream.h"
#include "support.h"

using namespace zeroband;

namespace {

constexpr uint32_t PEER = 1;

struct Target {
    explicit Target(bool is_ring) : shape{2, 5003, INT8, is_ring, false}, in(shape.numel, 1.0f), out(shape.numel) {
        reduce = std::make_unique<Reduce>(spec_of(shape, 0, 1, in.data(), out.data()), pool);
        reduce->begin();
    }

    // False: the stream would be closed.
    bool feed(const uint8_t* data, size_t size) {
        FrameReader reader(pool, nullptr);
        const FrameReader::Sink sink = {
            [this](const Frame& frame) {
                using Verdict = FrameReader::Verdict;
                if (!(frame.operation == reduce->spec().operation))
                    return frame.operation.run == 7 ? Verdict::SKIP : Verdict::REFUSE;
                return reduce->expects(PEER, frame) ? Verdict::TAKE : Verdict::REFUSE;
            },
            [this](PacketPtr packet) {
                std::vector<uint32_t> awakened;
                reduce->receive(PEER, std::move(packet), awakened);
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

    const Case shape;
    std::vector<float> in, out;
    std::shared_ptr<PacketPool> pool = std::make_shared<PacketPool>();
    std::unique_ptr<Reduce> reduce;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    Target target((data[0] & 1) != 0);
    target.feed(data + 1, size - 1);
    return 0;
}

#ifndef ZEROBAND_LIBFUZZER

namespace {

// What the other member would send if it spoke alone.
std::vector<uint8_t> honest(bool is_ring) {
    const Case shape{2, 5003, INT8, is_ring, false};
    std::vector<float> in(shape.numel, 0.5f), out(shape.numel);
    Reduce reduce(spec_of(shape, PEER, 1, in.data(), out.data()), std::make_shared<PacketPool>());
    reduce.begin();
    std::vector<uint8_t> sent;
    while (PacketPtr packet = reduce.next(0))
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
    const std::vector<uint8_t> seeds[2] = {honest(false), honest(true)};
    REQUIRE(Target(false).feed(seeds[0].data(), seeds[0].size()));
    REQUIRE(Target(true).feed(seeds[1].data(), seeds[1].size()));
    for (long round = 0; round < rounds; ++round) {
        const size_t kind = random() % 2;
        std::vector<uint8_t> bytes{static_cast<uint8_t>(kind)};
        const std::vector<uint8_t> tail = mutated(seeds[kind], random);
        bytes.insert(bytes.end(), tail.begin(), tail.end());
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::puts("ok");
}

#endif
