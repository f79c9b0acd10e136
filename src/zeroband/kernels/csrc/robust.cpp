#include "robust.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace zeroband {
namespace {

constexpr size_t TOO_FEW = 2;  // with two contributions, either may be the outlier
constexpr size_t WIDTH = 64;   // of `RobustKernels::middle`

struct Row {
    const Contribution* from;
    const float* values;
    double norm;
};

using Network = std::vector<uint32_t>;  // two rows for each pair

// Batcher's odd-even merge sort of `count` rows.
Network sorting_network(size_t count) {
    Network pairs;
    for (size_t p = 1; p < count; p *= 2)
        for (size_t k = p; k >= 1; k /= 2)
            for (size_t j = k % p; j + k < count; j += 2 * k)
                for (size_t i = j; i < j + k && i + k < count; ++i)
                    if (i / (2 * p) == (i + k) / (2 * p)) {
                        pairs.push_back(static_cast<uint32_t>(i));
                        pairs.push_back(static_cast<uint32_t>(i + k));
                    }
    return pairs;
}

const Network& network_of(size_t count) {
    thread_local std::vector<Network> known;
    if (known.size() <= count) known.resize(count + 1);
    if (count > 1 && known[count].empty()) known[count] = sorting_network(count);
    return known[count];
}

// The lower median.
double median_low(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

// Clipping factor of a contribution with norm `length` and limit `most`.
double shrunk(double length, double most) { return length > most ? most / length : 1.0; }

class Piece {
  public:
    Piece(const RobustKernels& kernels, const std::vector<Row>& rows, size_t n, double total, float* room, float* out)
        : kernels_(kernels), rows_(rows), n_(n), total_(total), room_(room), out_(out) {
        for (const Row& row : rows) counted_ += row.from->share;
    }

    void combine(const Robust& robust) {
        switch (robust.rule) {
            case TRIMMED: return trimmed(robust.trim);
            case CENTERED: return centered(robust.iterations);
            default: return clipped(robust.rule == CLIP);
        }
    }

  private:
    void clipped(bool clips) {
        double most = std::numeric_limits<double>::infinity();
        if (clips && rows_.size() > TOO_FEW) {
            std::vector<double> norms;
            for (const Row& row : rows_) norms.push_back(row.norm);
            most = median_low(norms);
        }
        std::fill(out_, out_ + n_, 0.0f);
        for (const Row& row : rows_) {
            const double share = row.from->share / counted_ * total_;
            kernels_.add_scaled(row.values, n_, static_cast<float>(share * shrunk(row.norm, most)), out_);
        }
    }

    void trimmed(double part) {
        const auto wanted = static_cast<size_t>(part * static_cast<double>(rows_.size()));
        middle(std::min(std::max<size_t>(wanted, 1), (rows_.size() - 1) / 2));
        scale_by_total();
    }

    void centered(uint32_t iterations) {
        thread_local std::vector<float> before;
        before.resize(n_);
        middle((rows_.size() - 1) / 2);
        for (uint32_t iteration = 0; iteration < iterations; ++iteration) {
            std::copy(out_, out_ + n_, before.begin());
            std::vector<double> distances;
            for (const Row& row : rows_) distances.push_back(std::sqrt(kernels_.squared_distance(row.values, before.data(), n_)));
            const double most = median_low(distances);
            for (size_t i = 0; i < rows_.size(); ++i) {
                const double weight = rows_[i].from->share / counted_ * shrunk(distances[i], most);
                kernels_.add_difference(rows_[i].values, before.data(), n_, static_cast<float>(weight), out_);
            }
        }
        scale_by_total();
    }

    void middle(size_t trim) {
        thread_local std::vector<const float*> columns;
        columns.clear();
        for (const Row& row : rows_) columns.push_back(row.values);
        const Network& network = network_of(rows_.size());
        const auto* pairs = reinterpret_cast<const uint32_t(*)[2]>(network.data());
        kernels_.middle(columns.data(), columns.size(), trim, pairs, network.size() / 2, n_, room_, out_);
    }

    void scale_by_total() {
        const float factor = static_cast<float>(total_);
        for (size_t i = 0; i < n_; ++i) out_[i] *= factor;
    }

    const RobustKernels& kernels_;
    const std::vector<Row>& rows_;
    const size_t n_;
    const double total_;
    double counted_ = 0;
    float* const room_;
    float* const out_;
};

// A total order of contributions by their bytes in the piece only, so that it does not depend on member order.
void sort_by_content(std::vector<Contribution>& pieces, size_t bytes) {
    std::sort(pieces.begin(), pieces.end(), [bytes](const Contribution& a, const Contribution& b) {
        const int order = std::memcmp(a.data, b.data, bytes);
        return order != 0 ? order < 0 : a.share < b.share;
    });
}

}  // namespace

void combine(const Robust& robust, CodecId codec, int variant, const std::vector<Contribution>& contributions, size_t n,
             float* out, const Measured& measured) {
    const int chosen = variant < 0 ? variant_count() - 1 : variant;
    const RobustKernels& kernels = robust_kernels_of(chosen);
    const Codec& coding = codec_of(codec, chosen);
    thread_local std::vector<float> decoded, room;
    thread_local std::vector<uint8_t> parts;
    thread_local std::vector<Contribution> pieces;
    thread_local std::vector<std::pair<uint32_t, size_t>> copies;  // members with equal bytes share one row: member, row
    const size_t most = encoded_size(codec, PIECE);
    decoded.resize(contributions.size() * PIECE);
    room.resize(contributions.size() * WIDTH);
    parts.resize(contributions.size() * most);
    std::vector<Row> rows;
    for (size_t start = 0; start < n; start += PIECE) {
        const size_t size = std::min(PIECE, n - start);
        rows.clear();
        copies.clear();
        pieces = contributions;
        for (size_t i = 0; i < pieces.size(); ++i) {
            take_part(codec, contributions[i].data, n, start, size, parts.data() + i * most);
            pieces[i].data = parts.data() + i * most;
        }
        sort_by_content(pieces, encoded_size(codec, size));
        double total = 0;
        for (const Contribution& one : pieces) total += one.share;
        for (size_t i = 0; i < pieces.size(); ++i) {
            float* values = decoded.data() + i * PIECE;
            coding.decode(pieces[i].data, size, values);
            const double square = kernels.dot(values, values, size);
            if (!std::isfinite(square)) {
                measured.dots[pieces[i].member] = -std::numeric_limits<double>::infinity();
                continue;
            }
            measured.squares[pieces[i].member] += square;
            if (square > 0 && i > 0 && std::memcmp(pieces[i - 1].data, pieces[i].data, encoded_size(codec, size)) == 0) {
                copies.push_back({pieces[i - 1].member, rows.size() - 1});
                rows.back().from = &pieces[i];
            } else {
                rows.push_back({&pieces[i], values, std::sqrt(square)});
            }
        }
        float* const piece = out + start;
        if (!rows.empty()) Piece(kernels, rows, size, total, room.data(), piece).combine(robust);
        const double square = rows.empty() ? 0 : kernels.dot(piece, piece, size);
        if (rows.empty() || !std::isfinite(square)) {
            std::fill(piece, piece + size, 0.0f);
            continue;
        }
        *measured.result += square;
        for (const Row& row : rows) measured.dots[row.from->member] += kernels.dot(row.values, piece, size);
        for (const auto& [member, row] : copies) measured.dots[member] += kernels.dot(rows[row].values, piece, size);
    }
}

}  // namespace zeroband
