// KV events that threads apply to the prefix index. See docs/radix.md.
//
// Lock order: a shard of Streams, then either the handoffs or the locks of the index. No lock is held
// while a thread receives or decodes.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "kv_events.hpp"
#include "radix_shared.hpp"

namespace dynamo::ingest {

using kv_events::Batch;
using kv_events::Event;

// In the order of STATUSES and WARNINGS in ingest.pyx.
enum Status : uint8_t { OK, PARENT_NOT_FOUND, BLOCK_NOT_FOUND, INVALID_BLOCK, IGNORED_TIER, STATUSES };
enum Warning : uint8_t {
    DUPLICATE,
    UNKNOWN_WORKER,
    OVERFLOWED,
    MALFORMED,
    SEQUENCE_GAP,
    FAILED,
    WARNINGS
};

// A file descriptor that is readable between notify() and clear().
class WakeupFd {
public:
    WakeupFd() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    ~WakeupFd() { close(descriptor_); }
    WakeupFd(const WakeupFd &) = delete;
    WakeupFd &operator=(const WakeupFd &) = delete;

    int descriptor() const noexcept { return descriptor_; }
    void notify() noexcept {
        uint64_t one = 1;
        [[maybe_unused]] ssize_t written = write(descriptor_, &one, sizeof one);  // full: readable already
    }
    void clear() noexcept {
        uint64_t count;
        [[maybe_unused]] ssize_t size = read(descriptor_, &count, sizeof count);
    }

private:
    int descriptor_;
};

// EVENTS: a batch, of which the events of `dp_rank` from index `first` on are not applied. UNDECODED:
// a payload that the compiled decoder rejects; the Python decoder decides. Without a payload, of the
// publisher `worker`: RESTARTED, it counts its messages from the start again; LOST, some were lost.
enum HandoffKind : uint8_t { EVENTS, UNDECODED, RESTARTED, LOST };

// Work that a thread passes to the loop.
struct Handoff {
    HandoffKind kind = UNDECODED;
    uint32_t dp_rank = 0;
    uint64_t worker = 0;
    size_t first = 0;
    std::string payload;
};

// The streams of events, by (worker, dp_rank). Each has one owner: a thread, while it is *delegated*
// (the thread applies the next event in order), else the loop (threads hand off its events, in order).
// An event that is not the next one returns a stream to the loop.
class Streams {
public:
    explicit Streams(radix::SharedIndex *index) : writer_(*index) {}

    int descriptor() const noexcept { return wakeup_.descriptor(); }
    void clear_wakeup() noexcept { wakeup_.clear(); }
    uint64_t applied(size_t kind, size_t status) const noexcept { return applied_[kind][status]; }
    uint64_t warned(size_t warning) const noexcept { return warnings_[warning]; }
    void count(Warning warning, uint64_t times = 1) noexcept { warnings_[warning] += times; }

    // Registers a stream, owned by the loop.
    void add(uint64_t worker, uint32_t dp_rank, uint32_t slot) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        shard.streams[Key{worker, dp_rank}].slot = slot;
    }

    // Gives the stream to the threads. False if it is unknown, or if handed-off events of it are
    // pending: applying later ones first would break their order.
    bool delegate(uint64_t worker, uint32_t dp_rank, bool has_last, int64_t last) {
        return with_stream(worker, dp_rank, [=](Stream &stream) {
            if (stream.pending != 0) return false;
            stream.delegated = true;
            stream.has_last = has_last;
            stream.last = last;
            return true;
        });
    }

    // Returns the stream to the loop; false if it is unknown. Threads change a slot under the lock of
    // its shard only: none does after the return.
    bool reclaim(uint64_t worker, uint32_t dp_rank, bool *has_last, int64_t *last,
                 bool *received_any) {
        return with_stream(worker, dp_rank, [=](Stream &stream) {
            stream.delegated = false;
            *has_last = stream.has_last;
            *last = stream.last;
            *received_any = stream.received_any;
            return true;
        });
    }

    bool received_any(uint64_t worker, uint32_t dp_rank) {
        return with_stream(worker, dp_rank, [](Stream &stream) { return stream.received_any; });
    }

    // Forgets a stream. No thread changes its slot after the return.
    void remove(uint64_t worker, uint32_t dp_rank) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        shard.streams.erase(Key{worker, dp_rank});
    }

    // Takes the oldest handoff; false if there is none.
    bool next_handoff(Handoff *handoff) {
        {
            std::lock_guard<std::mutex> hold(handoffs_mutex_);
            if (handoffs_.empty()) return false;
            *handoff = std::move(handoffs_.front());
            handoffs_.pop_front();
            handoff_bytes_ -= handoff->payload.size();
        }
        if (handoff->kind == EVENTS)  // after the lock above is released: see the lock order
            with_stream(handoff->worker, handoff->dp_rank, [](Stream &stream) {
                // 0 if the stream was removed and added again since the handoff.
                return stream.pending != 0 && stream.pending-- != 0;
            });
        return true;
    }

    // Returns the publisher's streams to the loop: their earlier events do not count any more.
    void publisher_restarted(uint64_t worker) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        for (auto &[key, stream] : shard.streams)
            if (key.worker == worker) stream.delegated = false;
        hand_off(RESTARTED, worker);
    }

    // Hands off to the loop that events of any rank may have been lost.
    void messages_lost(uint64_t worker) { hand_off(LOST, worker); }

    // Applies a message's payload, or hands it off. `batch` is a buffer that the calling thread reuses.
    void process(const uint8_t *data, size_t size, Batch *batch) {
        if (!kv_events::BatchReader(data, size).read(batch)) {
            Handoff undecoded;
            enqueue(undecoded, data, size);
            return;
        }
        Shard &shard = shard_of(batch->worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        for (size_t at = 0; at < batch->events.size(); at++) {
            const Event &event = batch->events[at];
            auto found = shard.streams.find(Key{batch->worker, event.dp_rank});
            if (found == shard.streams.end()) {
                count(UNKNOWN_WORKER);
                continue;
            }
            Stream &stream = found->second;
            stream.received_any = true;
            if (stream.delegated) apply_next(stream, event);
            if (!stream.delegated && !stream.handed_off) hand_off(*batch, at, &stream, data, size);
        }
        // `handed_off` is only meaningful within one batch.
        for (const Event &event : batch->events) {
            auto found = shard.streams.find(Key{batch->worker, event.dp_rank});
            if (found != shard.streams.end()) found->second.handed_off = false;
        }
    }

private:
    static constexpr size_t SHARDS = 64;
    static constexpr size_t MAX_HANDOFFS = 65'536;
    static constexpr size_t MAX_HANDOFF_BYTES = 64u << 20;

    struct Key {
        uint64_t worker;
        uint32_t dp_rank;
        bool operator==(const Key &other) const noexcept {
            return worker == other.worker && dp_rank == other.dp_rank;
        }
    };

    struct Hash {
        size_t operator()(const Key &key) const noexcept {
            return static_cast<size_t>((key.worker + key.dp_rank) * 0x9E3779B97F4A7C15u >> 7);
        }
    };

    struct Stream {
        uint32_t slot = 0;
        uint32_t pending = 0;  // handoffs that the loop has not taken
        bool delegated = false;
        bool has_last = false;  // else any id may be the next
        bool received_any = false;
        bool handed_off = false;  // the rest of the current batch was
        int64_t last = 0;
    };

    struct Shard {
        std::mutex mutex;
        std::unordered_map<Key, Stream, Hash> streams;
    };

    // All ranks of a worker share a shard, so that process() locks once a batch. Fibonacci hashing:
    // the upper 6 bits select one of the 64 shards.
    Shard &shard_of(uint64_t worker) noexcept {
        return shards_[(worker * 0x9E3779B97F4A7C15u) >> 58];
    }

    // Runs `action` on a stream under the lock of its shard; false if the stream is unknown.
    template <class Action>
    bool with_stream(uint64_t worker, uint32_t dp_rank, Action action) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        auto found = shard.streams.find(Key{worker, dp_rank});
        return found != shard.streams.end() && action(found->second);
    }

    // Applies the event if it is the stream's next; returns the stream to the loop if events are
    // missing.
    void apply_next(Stream &stream, const Event &event) {
        if (stream.has_last && event.id <= stream.last) {
            count(DUPLICATE);
        } else if (stream.has_last && event.id != stream.last + 1) {
            stream.delegated = false;
        } else {
            applied_[event.kind][apply(stream.slot, event)]++;
            stream.has_last = true;
            stream.last = event.id;
        }
    }

    void hand_off(HandoffKind kind, uint64_t worker) {
        Handoff handoff;
        handoff.kind = kind;
        handoff.worker = worker;
        enqueue(handoff, nullptr, 0);
    }

    void hand_off(const Batch &batch, size_t first, Stream *stream, const uint8_t *data, size_t size) {
        stream->handed_off = true;
        Handoff handoff;
        handoff.kind = EVENTS;
        handoff.dp_rank = batch.events[first].dp_rank;
        handoff.worker = batch.worker;
        handoff.first = first;
        if (enqueue(handoff, data, size)) stream->pending++;
    }

    // False if the loop is too far behind: the handoff is dropped, and its event ids leave a gap that
    // starts a recovery. A restart is never dropped: no id would reveal it, nor does the sweep.
    bool enqueue(Handoff &handoff, const uint8_t *data, size_t size) {
        if (size != 0) handoff.payload.assign(reinterpret_cast<const char *>(data), size);
        std::lock_guard<std::mutex> hold(handoffs_mutex_);
        bool full = handoffs_.size() >= MAX_HANDOFFS || handoff_bytes_ + size > MAX_HANDOFF_BYTES;
        if (full && handoff.kind != RESTARTED)
            return count(OVERFLOWED), false;
        handoff_bytes_ += size;
        handoffs_.push_back(std::move(handoff));
        wakeup_.notify();
        return true;
    }

    Status apply(uint32_t slot, const Event &event) {
        if (event.tier == kv_events::UNKNOWN_TIER) return IGNORED_TIER;
        uint32_t place = slot | uint32_t{event.tier} << radix::TIER_SHIFT;
        const kv_events::Slice &blocks = event.block_hashes, &tokens = event.tokens_hashes;
        if (blocks.size % 8 != 0 || tokens.size % 8 != 0) return INVALID_BLOCK;
        if (event.kind == kv_events::CLEARED) {
            event.tier == 0 ? writer_.clear_all(slot) : writer_.clear(place);
            return OK;
        }
        if (event.kind == kv_events::REMOVED)
            return writer_.remove(place, blocks.data, blocks.size / 8) ? BLOCK_NOT_FOUND : OK;
        if (event.tier != 0 && tokens.size == 0)
            return writer_.adopt(place, blocks.data, blocks.size / 8) ? BLOCK_NOT_FOUND : OK;
        if (blocks.size != tokens.size) return INVALID_BLOCK;
        switch (writer_.store(place, event.has_parent, event.parent_hash, blocks.data, tokens.data,
                              blocks.size / 8)) {
            case radix::Stored::OK: return OK;
            case radix::Stored::NO_PARENT: return PARENT_NOT_FOUND;
            default: return INVALID_BLOCK;
        }
    }

    radix::Writer writer_;
    std::array<Shard, SHARDS> shards_;
    // Counters that the loop reads at any time; they order nothing else.
    std::array<std::array<std::atomic<uint64_t>, STATUSES>, kv_events::KINDS> applied_{};
    std::array<std::atomic<uint64_t>, WARNINGS> warnings_{};
    std::mutex handoffs_mutex_;  // guards the two below
    std::deque<Handoff> handoffs_;
    size_t handoff_bytes_ = 0;
    WakeupFd wakeup_;
};

}  // namespace dynamo::ingest
