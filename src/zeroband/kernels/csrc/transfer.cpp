#include "transfer.h"

#include <chrono>
#include <thread>
#include <utility>

namespace zeroband {

double monotonic_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Transfer::Transfer(const Operation& operation, uint32_t self, uint32_t world, std::shared_ptr<PacketPool> pool)
    : pool_(std::move(pool)), operation_(operation), self_(self), outgoing_(world), traffic_(world) {}

void Transfer::count(uint32_t peer, uint64_t payload_bytes, bool sends, bool is_part) {
    if (is_part && !sends) traffic_[peer].missing_part_bytes += payload_bytes;
    (sends ? traffic_[peer].to_send_bytes : traffic_[peer].to_receive_bytes) += payload_bytes;
    to_send_ += sends;
}

void Transfer::counted(uint64_t to_write, uint64_t to_see, double allowed) {
    to_write_ = to_write;
    seen_.assign(to_see, false);
    all_frames_ = to_send_;
    allow(allowed);
}

void Transfer::allow(double share) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!(share >= 0)) return;  // negative or NaN
    allowed_ = share >= 1 ? all_frames_ : static_cast<uint64_t>(share * static_cast<double>(all_frames_));
}

bool Transfer::has_sent_what_is_allowed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return all_frames_ - to_send_ >= allowed_;
}

PacketPtr Transfer::next(uint32_t peer) {
    Busy busy(*this);
    if (!busy) return nullptr;
    uint32_t shard = 0, chunk = 0;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (handed_out_ >= allowed_) return nullptr;
        const bool is_own = claim(peer, shard, chunk);
        if (!is_own && outgoing_[peer].empty()) return nullptr;
        ++handed_out_;
        if (traffic_[peer].first_sent_s == 0) traffic_[peer].first_sent_s = monotonic_s();
        if (!is_own) {
            PacketPtr packet = std::move(outgoing_[peer].front());
            outgoing_[peer].pop_front();
            return packet;
        }
    }
    return make(shard, chunk);
}

void Transfer::receive(uint32_t peer, PacketPtr packet, std::vector<uint32_t>& awakened) {
    Busy busy(*this);
    if (!busy) return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        traffic_[peer].received_bytes += packet->frame.payload_bytes;
        traffic_[peer].last_received_s = monotonic_s();
        const uint64_t number = number_of(peer, packet->frame);
        if (seen_[number]) return set_final(FOREIGN_FRAME, peer);
        seen_[number] = true;
        if (packet->frame.kind != FINAL) traffic_[peer].missing_part_bytes -= packet->frame.payload_bytes;
    }
    take(peer, std::move(packet), awakened);
}

void Transfer::enqueue(uint32_t peer, const PacketPtr& packet, std::vector<uint32_t>& awakened) {
    std::lock_guard<std::mutex> lock(mutex_);
    outgoing_[peer].push_back(packet);
    awakened.push_back(peer);
}

void Transfer::sent(uint32_t peer, size_t payload_bytes) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        Traffic& traffic = traffic_[peer];
        traffic.last_sent_s = monotonic_s();
        traffic.sent_bytes += payload_bytes;
    }
    settle(1, 0);
}

void Transfer::settle(uint64_t sent, uint64_t written) {
    std::lock_guard<std::mutex> lock(mutex_);
    to_send_ -= sent;
    to_write_ -= written;
    if (to_send_ == 0 && to_write_ == 0) set_final(DONE, 0);
}

void Transfer::set_final(TransferState reason, int64_t detail) {
    if (state_.load() != RUNNING) return;
    detail_ = detail;  // before the state, for threads that read the two without the lock
    state_ = reason;
    ended_.notify_all();
}

void Transfer::fail(TransferState reason, int64_t detail) {
    std::lock_guard<std::mutex> lock(mutex_);
    set_final(reason, detail);
}

void Transfer::end(TransferState reason, int64_t detail) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        set_final(reason, detail);
        for (auto& packets : outgoing_) packets.clear();
    }
    while (busy_.load() > 0) std::this_thread::yield();  // threads that entered before the state changed
}

bool Transfer::wait(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto has_ended = [this] { return state_.load() != RUNNING; };
    return ended_.wait_for(lock, std::chrono::duration<double>(seconds), has_ended);
}

Traffic Transfer::traffic(uint32_t peer) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return traffic_[peer];
}

}  // namespace zeroband
