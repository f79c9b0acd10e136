#include "engine.h"

#include <fcntl.h>
#include <linux/tcp.h>  // libc's tcp_info is older and shorter
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <iterator>

#include "loop.h"

namespace zeroband {
namespace {

constexpr uint32_t LONG_US = 500;          // round trips of at least this are not local
constexpr uint64_t ANY_LIMIT = 1ull << 40;  // bytes per second, above any link's rate
constexpr uint64_t NO_LIMIT = ~uint64_t{0};
constexpr double NEVER_S = 1e6;

tcp_info info_of(int fd) {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
    return info;
}

// A reachable machine's kernel acknowledges data and answers zero-window probes, whatever its processes do.
uint32_t unanswered_ms(const tcp_info& info) {
    const bool waits = info.tcpi_unacked > 0 || info.tcpi_probes > 1;
    return waits ? info.tcpi_last_ack_recv : 0;
}

// A transfer fills both directions of a link. On a long link the ACKs of one direction queue behind the data of the
// other (ACK compression), arrive together and release the next window as one burst. With any pacing limit, however
// high, Linux spreads a window evenly even under CUBIC. Sockets that refuse the option stay as they are.
void pace(int fd, uint64_t bytes_per_s) {
    const uint64_t limit = bytes_per_s > 0 ? bytes_per_s : info_of(fd).tcpi_rtt >= LONG_US ? ANY_LIMIT : NO_LIMIT;
    setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &limit, sizeof limit);
}

}  // namespace

uint32_t Running::member_of(uint32_t link) const {
    uint32_t member = 0;
    while (member < link_of.size() && (member == transfer->self() || link_of[member] != link)) ++member;
    return member;
}

Engine::Engine(int threads, double beat_s) : beat_s_(beat_s) {
    for (int i = 0; i < threads; ++i) loops_.push_back(std::make_unique<Loop>(*this, beat_s));
}

Engine::~Engine() { close(); }

void Engine::close() {
    std::call_once(closed_, [this] {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_closed_ = true;
            links_.clear();
        }
        for (const RunningPtr& running : all_running()) finish(running);
        for (const auto& loop : loops_) loop->end();
    });
}

void Engine::add_stream(uint32_t link, int fd, const uint8_t* seal_key, const uint8_t* open_key) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    pace(fd, 0);
    auto stream = std::make_unique<Stream>(fd, link, pool_, seal_key, open_key);
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_ || !links_[link].is_up) return;
    links_[link].streams[fd] = 0;
    loops_[next_loop_++ % loops_.size()]->add(std::move(stream));
}

void Engine::drop_link(uint32_t link) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (links_.erase(link) == 0) return;
    }
    for (const auto& loop : loops_) loop->drop(link);
    end_what_needs(link);
}

LinkState Engine::link_state(uint32_t link) {
    LinkState state;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = links_.find(link);
    if (found == links_.end()) return state;
    state.is_up = found->second.is_up;
    state.streams = static_cast<uint32_t>(found->second.streams.size());
    state.received_bytes = found->second.received_bytes;
    uint32_t busy = 0;
    double silent_s = found->second.streams.empty() ? 0 : NEVER_S, stalest_s = 0;
    for (const auto& [fd, stream_silent_s] : found->second.streams) {
        silent_s = std::min(silent_s, stream_silent_s);
        stalest_s = std::max(stalest_s, stream_silent_s);
        const tcp_info info = info_of(fd);
        const uint32_t rtt_us = info.tcpi_rtt;
        if (rtt_us > 0 && (state.rtt_us == 0 || rtt_us < state.rtt_us)) state.rtt_us = rtt_us;
        state.unanswered_ms = std::max(state.unanswered_ms, unanswered_ms(info));
        state.sent_packets += info.tcpi_data_segs_out;
        state.resent_packets += info.tcpi_total_retrans;
        if (info.tcpi_unacked == 0) continue;
        ++busy;
        state.window += info.tcpi_snd_cwnd;
    }
    if (busy > 0) state.window /= busy;
    state.silent_ms = static_cast<uint32_t>(1e3 * silent_s);
    state.stalest_ms = static_cast<uint32_t>(1e3 * stalest_s);
    return state;
}

void Engine::set_congestion(uint32_t link, const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = links_.find(link);
    if (found == links_.end()) return;
    for (const auto& [fd, _] : found->second.streams)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size()));
}

void Engine::set_pace(uint32_t link, uint64_t bytes_per_s) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = links_.find(link);
    if (found == links_.end()) return;
    for (const auto& [fd, _] : found->second.streams) pace(fd, bytes_per_s);
}

void Engine::set_senders(uint32_t link, uint32_t senders) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = links_.find(link);
        if (found == links_.end()) return;
        found->second.senders = senders;
    }
    for (const auto& loop : loops_) loop->awaken(link);
}

RunningPtr Engine::start(ReduceSpec spec, std::vector<uint32_t> links) {
    return start(std::make_unique<Reduce>(std::move(spec), pool_), std::move(links));
}

RunningPtr Engine::start(GatherSpec spec, std::vector<uint32_t> links) {
    return start(std::make_unique<Gather>(std::move(spec), pool_), std::move(links));
}

RunningPtr Engine::start(std::unique_ptr<Transfer> transfer, std::vector<uint32_t> links) {
    const auto running = std::make_shared<Running>(std::move(transfer), std::move(links));
    running->transfer->begin();
    std::vector<uint32_t> others;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        running_.push_back(running);
        newest_ = running->transfer->operation();
        has_started_ = true;
        for (uint32_t member = 0; member < running->link_of.size(); ++member) {
            if (member == running->transfer->self()) continue;
            others.push_back(member);
        }
    }
    for (const uint32_t member : others) {
        const uint32_t link = running->link_of[member];
        const LinkState state = link_state(link);
        const Traffic traffic = running->transfer->traffic(member);
        const bool is_needed = traffic.to_send_bytes + traffic.to_receive_bytes > 0;
        if (is_needed && !state.is_up) running->transfer->end(PEER_LOST, member);
    }
    for (const auto& loop : loops_) loop->retry_held();
    awaken(*running, others);
    return running;
}

void Engine::allow(const RunningPtr& running, double share) {
    running->transfer->allow(share);
    for (uint32_t member = 0; member < running->link_of.size(); ++member)
        if (member != running->transfer->self()) awaken(*running, {member});
}

void Engine::finish(const RunningPtr& running) {
    running->transfer->end(ABORTED, 0);
    std::lock_guard<std::mutex> lock(mutex_);
    running_.erase(std::remove(running_.begin(), running_.end(), running), running_.end());
}

RunningPtr Engine::running_of(const Operation& operation) {
    for (const RunningPtr& running : running_)
        if (running->transfer->operation() == operation) return running;
    return nullptr;
}

std::vector<RunningPtr> Engine::all_running() {
    std::lock_guard<std::mutex> lock(mutex_);
    return running_;
}

FrameReader::Verdict Engine::judge(uint32_t link, const Frame& frame) {
    using Verdict = FrameReader::Verdict;
    if (frame.kind == BEAT) return Verdict::SKIP;
    RunningPtr running;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        running = running_of(frame.operation);
        if (running == nullptr) {
            if (!has_started_) return Verdict::HOLD;
            if (frame.operation.run != newest_.run) return Verdict::REFUSE;
            return newest_.is_before(frame.operation) ? Verdict::HOLD : Verdict::SKIP;
        }
    }
    if (running->transfer->state() != RUNNING) return Verdict::SKIP;
    return running->transfer->expects(running->member_of(link), frame) ? Verdict::TAKE : Verdict::REFUSE;
}

void Engine::deliver(uint32_t link, PacketPtr packet) {
    RunningPtr running;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        running = running_of(packet->frame.operation);
    }
    if (running == nullptr) return;
    std::vector<uint32_t> awakened;
    running->transfer->receive(running->member_of(link), std::move(packet), awakened);
    awaken(*running, awakened);
}

// Records a loop's observations of one of its streams.
void Engine::heard(uint32_t link, int fd, double silent_s, uint64_t received_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = links_.find(link);
    if (found == links_.end()) return;
    found->second.received_bytes += received_bytes;
    const auto stream = found->second.streams.find(fd);
    if (stream != found->second.streams.end()) stream->second = silent_s;
}

bool Engine::is_sender(uint32_t link, int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = links_.find(link);
    if (found == links_.end()) return false;
    const auto& streams = found->second.streams;
    return std::distance(streams.begin(), streams.find(fd)) < static_cast<int64_t>(found->second.senders);
}

// Returns the next frame for a stream; older operations come first.
PacketPtr Engine::pick(uint32_t link, int fd, RunningPtr& running) {
    if (!is_sender(link, fd)) return nullptr;
    for (const RunningPtr& candidate : all_running()) {
        const uint32_t member = candidate->member_of(link);
        if (member >= candidate->link_of.size()) continue;
        PacketPtr packet = candidate->transfer->next(member);
        if (packet == nullptr) continue;
        running = candidate;
        return packet;
    }
    return nullptr;
}

void Engine::awaken(const Running& running, const std::vector<uint32_t>& members) {
    for (const uint32_t member : members)
        for (const auto& loop : loops_) loop->awaken(running.link_of[member]);
}

// One broken connection takes down its whole link: closing the others informs the other end.
void Engine::lose_stream(uint32_t link) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const auto found = links_.find(link);
        if (found == links_.end()) return;
        found->second.is_up = false;
        found->second.streams.clear();
    }
    for (const auto& loop : loops_) loop->drop(link);
    end_what_needs(link);
}

void Engine::end_what_needs(uint32_t link) {
    for (const RunningPtr& running : all_running()) {
        const uint32_t member = running->member_of(link);
        if (member >= running->link_of.size()) continue;
        const Traffic traffic = running->transfer->traffic(member);
        const bool is_over = traffic.sent_bytes == traffic.to_send_bytes && traffic.received_bytes == traffic.to_receive_bytes;
        if (!is_over) running->transfer->end(PEER_LOST, member);
    }
}

}  // namespace zeroband
