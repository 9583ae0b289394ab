// KV events applied to the prefix index by threads of their own. See docs/radix.md.
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

enum Status : uint8_t { OK, PARENT_NOT_FOUND, BLOCK_NOT_FOUND, INVALID_BLOCK, IGNORED_TIER, STATUSES };
enum Oddity : uint8_t { DUPLICATE, UNKNOWN_WORKER, OVERFLOWED, FOREIGN, SEQUENCE_GAP, FAILED, ODDITIES };

// A file descriptor that wakes whoever polls it.
class Bell {
public:
    Bell() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    ~Bell() { close(descriptor_); }
    Bell(const Bell &) = delete;
    Bell &operator=(const Bell &) = delete;

    int descriptor() const noexcept { return descriptor_; }
    void ring() noexcept {
        uint64_t one = 1;
        [[maybe_unused]] ssize_t written = write(descriptor_, &one, sizeof one);  // full: rung enough
    }
    void silence() noexcept {
        uint64_t count;
        [[maybe_unused]] ssize_t taken = read(descriptor_, &count, sizeof count);
    }

private:
    int descriptor_;
};

// What a thread leaves to the loop. EVENTS: a batch from its event `first` on, as far as it is of
// `dp_rank`. ODD: a payload that only the Python decoder can judge. ANEW: no payload; the publisher
// called `worker` began to count anew.
enum What : uint8_t { EVENTS, ODD, ANEW };

struct Handed {
    What what = ODD;
    uint32_t dp_rank = 0;
    uint64_t worker = 0;
    size_t first = 0;
    std::string payload;
};

// The streams of events, each either *direct* (a thread applies what is next in order) or the
// loop's (threads hand its events over, in order). What is not next makes a stream the loop's.
class Streams {
public:
    explicit Streams(radix::SharedIndex *index) : writer_(*index) {}

    int descriptor() const noexcept { return bell_.descriptor(); }
    void silence() noexcept { bell_.silence(); }
    uint64_t applied(size_t kind, size_t status) const noexcept { return applied_[kind][status]; }
    uint64_t odd(size_t oddity) const noexcept { return odd_[oddity]; }
    void count(Oddity oddity, uint64_t times = 1) noexcept { odd_[oddity] += times; }

    // From now on the stream is known, and the loop's.
    void follow(uint64_t worker, uint32_t dp_rank, uint32_t slot) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        shard.streams[Key{worker, dp_rank}].slot = slot;
    }

    // From now on the stream is direct; false if events of it still wait to be taken by the loop.
    bool give(uint64_t worker, uint32_t dp_rank, bool has_last, int64_t last) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        auto found = shard.streams.find(Key{worker, dp_rank});
        if (found == shard.streams.end() || found->second.pending != 0) return false;
        Stream &stream = found->second;
        stream.direct = true;
        stream.has_last = has_last;
        stream.last = last;
        return true;
    }

    // From now on the stream is the loop's; false if it is not known.
    bool take(uint64_t worker, uint32_t dp_rank, bool *has_last, int64_t *last, bool *heard) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        auto found = shard.streams.find(Key{worker, dp_rank});
        if (found == shard.streams.end()) return false;
        found->second.direct = false;
        *has_last = found->second.has_last;
        *last = found->second.last;
        *heard = found->second.heard;
        return true;
    }

    bool heard(uint64_t worker, uint32_t dp_rank) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        auto found = shard.streams.find(Key{worker, dp_rank});
        return found != shard.streams.end() && found->second.heard;
    }

    // When this returns no thread touches the stream's slot any more.
    void forget(uint64_t worker, uint32_t dp_rank) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        shard.streams.erase(Key{worker, dp_rank});
    }

    // The oldest thing left to the loop; false if there is none.
    bool next_handed(Handed *handed) {
        {
            std::lock_guard<std::mutex> hold(handed_mutex_);
            if (handed_.empty()) return false;
            *handed = std::move(handed_.front());
            handed_.pop_front();
            handed_bytes_ -= handed->payload.size();
        }
        if (handed->what != EVENTS) return true;
        Shard &shard = shard_of(handed->worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        auto found = shard.streams.find(Key{handed->worker, handed->dp_rank});
        if (found != shard.streams.end() && found->second.pending != 0) found->second.pending--;
        return true;
    }

    // What the publisher told before is void: its streams are the loop's from here on.
    void renew(uint64_t worker) {
        Shard &shard = shard_of(worker);
        std::lock_guard<std::mutex> hold(shard.mutex);
        for (auto &[key, stream] : shard.streams)
            if (key.worker == worker) stream.direct = false;
        Handed handed;
        handed.what = ANEW;
        handed.worker = worker;
        hand(handed, nullptr, 0);
    }

    // A message's payload, on one of the threads; `batch` is that thread's scratch.
    void process(const uint8_t *data, size_t size, Batch *batch) {
        if (!kv_events::BatchReader(data, size).read(batch)) {
            Handed odd;
            hand(odd, data, size);
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
            stream.heard = true;
            if (stream.direct) take_next(stream, event);
            if (!stream.direct && !stream.left) leave(*batch, at, &stream, data, size);
        }
        for (const Event &event : batch->events) {
            auto found = shard.streams.find(Key{batch->worker, event.dp_rank});
            if (found != shard.streams.end()) found->second.left = false;
        }
    }

private:
    static constexpr size_t SHARDS = 64;
    static constexpr size_t MAX_HANDED = 65'536;
    static constexpr size_t MAX_HANDED_BYTES = 64u << 20;

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
        uint32_t pending = 0;  // batches handed over that the loop has not taken
        bool direct = false;
        bool has_last = false;  // else any id may come next
        bool heard = false;
        bool left = false;  // the rest of the batch at hand was handed over
        int64_t last = 0;
    };

    struct Shard {
        std::mutex mutex;
        std::unordered_map<Key, Stream, Hash> streams;
    };

    Shard &shard_of(uint64_t worker) noexcept {
        return shards_[(worker * 0x9E3779B97F4A7C15u) >> 58];
    }

    // Applies the event if it is the stream's next; makes the stream the loop's if events are missing.
    void take_next(Stream &stream, const Event &event) {
        if (stream.has_last && event.id <= stream.last) {
            count(DUPLICATE);
        } else if (stream.has_last && event.id != stream.last + 1) {
            stream.direct = false;
        } else {
            applied_[event.kind][apply(stream.slot, event)]++;
            stream.has_last = true;
            stream.last = event.id;
        }
    }

    void leave(const Batch &batch, size_t first, Stream *stream, const uint8_t *data, size_t size) {
        stream->left = true;
        Handed handed;
        handed.what = EVENTS;
        handed.dp_rank = batch.events[first].dp_rank;
        handed.worker = batch.worker;
        handed.first = first;
        if (hand(handed, data, size)) stream->pending++;
    }

    // Too much for the loop: what does not fit is lost, and will be missed and asked for.
    bool hand(Handed &handed, const uint8_t *data, size_t size) {
        if (size != 0) handed.payload.assign(reinterpret_cast<const char *>(data), size);
        std::lock_guard<std::mutex> hold(handed_mutex_);
        bool full = handed_.size() >= MAX_HANDED || handed_bytes_ + size > MAX_HANDED_BYTES;
        if (full && handed.what != ANEW)
            return count(OVERFLOWED), false;
        handed_bytes_ += size;
        handed_.push_back(std::move(handed));
        bell_.ring();
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
    std::array<std::array<std::atomic<uint64_t>, STATUSES>, kv_events::KINDS> applied_{};
    std::array<std::atomic<uint64_t>, ODDITIES> odd_{};
    std::mutex handed_mutex_;  // taken while a shard is held, never the other way round
    std::deque<Handed> handed_;
    size_t handed_bytes_ = 0;
    Bell bell_;
};

}  // namespace dynamo::ingest
