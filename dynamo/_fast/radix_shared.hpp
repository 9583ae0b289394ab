// The prefix index shared by threads: locks held for short steps, readers first. See docs/radix.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "radix.hpp"

namespace dynamo::radix {

// Two mutexes. `tree_` protects the index; a match holds it. `tables_` keeps other threads from
// changing the tables of held blocks while a writer copies its own table into a larger one, which may
// take milliseconds: so that copy does not block matches. Lock order: `tables_`, then `tree_`.
//
// Until share() is called there is one thread and no lock is taken. share() is called before the first
// thread starts, which orders the write of `shared_` before every read.
class IndexLock {
public:
    void share() noexcept { shared_ = true; }

    // Held by a match. Waiting writers yield to it.
    class Read {
    public:
        explicit Read(IndexLock &lock) : lock_(lock.shared_ ? &lock : nullptr) {
            if (lock_ != nullptr) lock_->enter_first();
        }
        ~Read() {
            if (lock_ != nullptr) lock_->tree_.unlock();
        }
        Read(const Read &) = delete;
        Read &operator=(const Read &) = delete;

    private:
        IndexLock *lock_;
    };

    // Held for a change by another thread than the writer of the slot.
    class Change {
    public:
        explicit Change(IndexLock &lock) : lock_(lock.shared_ ? &lock : nullptr) {
            if (lock_ == nullptr) return;
            lock_->tables_.lock();
            lock_->enter_first();
        }
        ~Change() {
            if (lock_ == nullptr) return;
            lock_->tree_.unlock();
            lock_->tables_.unlock();
        }
        Change(const Change &) = delete;
        Change &operator=(const Change &) = delete;

    private:
        IndexLock *lock_;
    };

    // Held by the writer of a slot for a step of a few blocks.
    class Step {
    public:
        explicit Step(IndexLock &lock) : lock_(lock) {
            // Relaxed: the counter is a hint for fairness, only the mutex excludes and orders.
            while (lock_.waiting_.load(std::memory_order_relaxed) != 0) std::this_thread::yield();
            lock_.tree_.lock();
        }
        ~Step() { lock_.tree_.unlock(); }
        Step(const Step &) = delete;
        Step &operator=(const Step &) = delete;

    private:
        IndexLock &lock_;
    };

    std::mutex &tables() noexcept { return tables_; }

private:
    static constexpr int SPINS = 400;  // about the duration of a step: sleeping takes longer

    void enter_first() {
        if (tree_.try_lock()) return;
        waiting_.fetch_add(1, std::memory_order_relaxed);
        for (int spin = 0; spin < SPINS; spin++) {
            pause();
            if (tree_.try_lock()) {
                waiting_.fetch_sub(1, std::memory_order_relaxed);
                return;
            }
        }
        tree_.lock();
        waiting_.fetch_sub(1, std::memory_order_relaxed);
    }

    static void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#else
        std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
    }

    bool shared_ = false;
    std::atomic<uint32_t> waiting_{0};
    std::mutex tables_, tree_;
};

// The index with its lock: every method may be called on any thread.
class SharedIndex {
public:
    Index index;
    IndexLock lock;

    void set_cap(size_t blocks) noexcept { index.set_cap(blocks); }
    void share() noexcept { lock.share(); }

    size_t blocks() {
        IndexLock::Read hold(lock);
        return index.blocks();
    }
    size_t nodes() {
        IndexLock::Read hold(lock);
        return index.nodes();
    }
    size_t dropped() {
        IndexLock::Read hold(lock);
        return index.dropped();
    }
    size_t memory_bytes() {
        IndexLock::Read hold(lock);
        return index.memory_bytes();
    }
    size_t held(uint32_t slot) {
        IndexLock::Read hold(lock);
        return index.held(slot);
    }
    bool is_open(uint32_t slot) {
        IndexLock::Read hold(lock);
        return index.is_open(slot);
    }
    void open_slot(uint32_t slot) {
        IndexLock::Change hold(lock);
        index.open_slot(slot);
    }
    Stored store(uint32_t slot, bool has_parent, uint64_t parent_hash, const uint8_t *block_hashes,
                 const uint8_t *tokens_hashes, size_t count, size_t *added) {
        IndexLock::Change hold(lock);
        return index.store(slot, has_parent, parent_hash, block_hashes, tokens_hashes, count, added);
    }
    size_t remove(uint32_t slot, const uint8_t *block_hashes, size_t count) {
        IndexLock::Change hold(lock);
        return index.remove(slot, block_hashes, count);
    }
    size_t adopt(uint32_t slot, const uint8_t *block_hashes, size_t count) {
        IndexLock::Change hold(lock);
        return index.adopt(slot, block_hashes, count);
    }
    size_t clear(uint32_t slot) {
        IndexLock::Change hold(lock);
        return index.clear(slot);
    }
    size_t clear_all(uint32_t number) {
        IndexLock::Change hold(lock);
        return index.clear_all(number);
    }
    size_t match(const uint8_t *tokens_hashes, size_t count, uint32_t *depths, bool early_exit) {
        IndexLock::Read hold(lock);
        return index.match(tokens_hashes, count, depths, early_exit);
    }
    size_t extend(const uint8_t *tokens_hashes, size_t count, const uint32_t *depths,
                  uint32_t *extensions, uint32_t tier) {
        IndexLock::Read hold(lock);
        return index.extend(tokens_hashes, count, depths, extensions, tier);
    }
    void ranges(const uint8_t *tokens_hashes, size_t count, uint32_t tier,
                std::vector<uint32_t> *out) {
        IndexLock::Read hold(lock);
        index.ranges(tokens_hashes, count, tier, out);
    }
    uint32_t tiers() {
        IndexLock::Read hold(lock);
        return index.tiers();
    }
    void dump(Dump *out, bool all_tiers) {
        IndexLock::Read hold(lock);
        index.dump(out, all_tiers);
    }
    std::string complaint() {
        IndexLock::Read hold(lock);
        return index.complaint();
    }
};

// Changes by the writer of a slot, in steps. Each slot has one writer at a time: a thread, while its
// stream is delegated (see ingest.hpp), else the loop.
class Writer {
public:
    explicit Writer(SharedIndex &shared) : index_(shared.index), lock_(shared.lock) {}

    // As Index::store; a rejected event changes nothing.
    Stored store(uint32_t slot, bool has_parent, uint64_t parent_hash, const uint8_t *block_hashes,
                 const uint8_t *tokens_hashes, size_t count) {
        open(slot);
        uint32_t node = ROOT;
        {
            IndexLock::Step hold(lock_);
            Stored outcome = index_.begin(slot, has_parent, parent_hash, block_hashes, count, &node);
            if (outcome != Stored::OK) return outcome;
        }
        for (size_t at = 0; at < count; at += STEP_BLOCKS) {
            size_t part = std::min(STEP_BLOCKS, count - at);
            grow(slot, part);
            IndexLock::Step hold(lock_);
            if (index_.store_part(slot, &node, block_hashes + 8 * at, tokens_hashes + 8 * at, part))
                continue;
            index_.drop(count - at - part);
            break;
        }
        return Stored::OK;
    }

    size_t remove(uint32_t slot, const uint8_t *block_hashes, size_t count) {
        open(slot);
        size_t unknown = 0;
        for (size_t at = 0; at < count; at += STEP_BLOCKS) {
            IndexLock::Step hold(lock_);
            unknown += index_.remove(slot, block_hashes + 8 * at, std::min(STEP_BLOCKS, count - at));
        }
        return unknown;
    }

    // As Index::adopt.
    size_t adopt(uint32_t slot, const uint8_t *block_hashes, size_t count) {
        open(slot);
        size_t unknown = 0;
        for (size_t at = 0; at < count; at += STEP_BLOCKS) {
            size_t part = std::min(STEP_BLOCKS, count - at);
            grow(slot, part);
            IndexLock::Step hold(lock_);
            unknown += index_.adopt(slot, block_hashes + 8 * at, part);
        }
        return unknown;
    }

    void clear(uint32_t slot) {
        open(slot);
        uint64_t from = 0;
        for (bool more = true; more;) {
            IndexLock::Step hold(lock_);
            more = index_.clear_some(slot, &from, STEP_BLOCKS);
        }
    }

    void clear_all(uint32_t number) {
        for (uint32_t tier = 0; tier < TIERS; tier++)
            if (is_open(tier << TIER_SHIFT | number)) clear(tier << TIER_SHIFT | number);
    }

private:
    static constexpr size_t STEP_BLOCKS = 64;

    bool is_open(uint32_t slot) {
        IndexLock::Step hold(lock_);
        return index_.is_open(slot);
    }

    void open(uint32_t slot) {
        if (tier_of(slot) == 0 || is_open(slot)) return;
        IndexLock::Change hold(lock_);
        index_.open_slot(slot);
    }

    // Makes room in the slot's table. No other thread inserts into it, so the room remains after the
    // locks are released; the copy happens outside `tree_`, and only the exchange inside.
    void grow(uint32_t slot, size_t count) {
        {
            IndexLock::Step hold(lock_);
            if (index_.has_room(slot, count)) return;
        }
        std::lock_guard<std::mutex> others(lock_.tables());
        Index::Held table = index_.grown(slot, count);
        IndexLock::Step hold(lock_);
        index_.exchange(slot, &table);
    }

    Index &index_;
    IndexLock &lock_;
};

}  // namespace dynamo::radix
