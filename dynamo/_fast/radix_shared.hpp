// The prefix index among threads: one lock, held for short bites, readers first. See docs/radix.md.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "radix.hpp"

namespace dynamo::radix {

// Two locks. `tree` is what a match needs. `tables` keeps the tables of held blocks from changes by
// others while a writer copies its own one into a larger one, which may take milliseconds. Whoever
// changes anything from outside a writer's thread takes both, `tables` first.
//
// Until share() is called there is one thread and no lock is taken.
class Gate {
public:
    void share() noexcept { shared_ = true; }

    // A match. It goes before all writers that wait.
    class Read {
    public:
        explicit Read(Gate &gate) : gate_(gate.shared_ ? &gate : nullptr) {
            if (gate_ != nullptr) gate_->enter_first();
        }
        ~Read() {
            if (gate_ != nullptr) gate_->tree_.unlock();
        }
        Read(const Read &) = delete;
        Read &operator=(const Read &) = delete;

    private:
        Gate *gate_;
    };

    // A change by somebody else than the one writer of a slot.
    class Change {
    public:
        explicit Change(Gate &gate) : gate_(gate.shared_ ? &gate : nullptr) {
            if (gate_ == nullptr) return;
            gate_->tables_.lock();
            gate_->enter_first();
        }
        ~Change() {
            if (gate_ == nullptr) return;
            gate_->tree_.unlock();
            gate_->tables_.unlock();
        }
        Change(const Change &) = delete;
        Change &operator=(const Change &) = delete;

    private:
        Gate *gate_;
    };

    // A few blocks by the one writer of their slot.
    class Bite {
    public:
        explicit Bite(Gate &gate) : gate_(gate) {
            while (gate_.waiting_.load(std::memory_order_relaxed) != 0) std::this_thread::yield();
            gate_.tree_.lock();
        }
        ~Bite() { gate_.tree_.unlock(); }
        Bite(const Bite &) = delete;
        Bite &operator=(const Bite &) = delete;

    private:
        Gate &gate_;
    };

    std::mutex &tables() noexcept { return tables_; }

private:
    static constexpr int SPINS = 400;  // about as long as a bite takes

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

// The index behind its lock: every call may come from any thread.
class SharedIndex {
public:
    Index index;
    Gate gate;

    void set_cap(size_t blocks) noexcept { index.set_cap(blocks); }
    void share() noexcept { gate.share(); }

    size_t blocks() {
        Gate::Read hold(gate);
        return index.blocks();
    }
    size_t nodes() {
        Gate::Read hold(gate);
        return index.nodes();
    }
    size_t dropped() {
        Gate::Read hold(gate);
        return index.dropped();
    }
    size_t memory_bytes() {
        Gate::Read hold(gate);
        return index.memory_bytes();
    }
    size_t held(uint32_t slot) {
        Gate::Read hold(gate);
        return index.held(slot);
    }
    bool is_open(uint32_t slot) {
        Gate::Read hold(gate);
        return index.is_open(slot);
    }
    void open_slot(uint32_t slot) {
        Gate::Change hold(gate);
        index.open_slot(slot);
    }
    Stored store(uint32_t slot, bool has_parent, uint64_t parent_hash, const uint8_t *block_hashes,
                 const uint8_t *tokens_hashes, size_t count, size_t *added) {
        Gate::Change hold(gate);
        return index.store(slot, has_parent, parent_hash, block_hashes, tokens_hashes, count, added);
    }
    size_t remove(uint32_t slot, const uint8_t *block_hashes, size_t count) {
        Gate::Change hold(gate);
        return index.remove(slot, block_hashes, count);
    }
    size_t adopt(uint32_t slot, const uint8_t *block_hashes, size_t count) {
        Gate::Change hold(gate);
        return index.adopt(slot, block_hashes, count);
    }
    size_t clear(uint32_t slot) {
        Gate::Change hold(gate);
        return index.clear(slot);
    }
    size_t clear_all(uint32_t number) {
        Gate::Change hold(gate);
        return index.clear_all(number);
    }
    size_t match(const uint8_t *tokens_hashes, size_t count, uint32_t *depths, bool early_exit) {
        Gate::Read hold(gate);
        return index.match(tokens_hashes, count, depths, early_exit);
    }
    size_t extend(const uint8_t *tokens_hashes, size_t count, const uint32_t *depths,
                  uint32_t *extensions, uint32_t tier) {
        Gate::Read hold(gate);
        return index.extend(tokens_hashes, count, depths, extensions, tier);
    }
    void ranges(const uint8_t *tokens_hashes, size_t count, uint32_t tier,
                std::vector<uint32_t> *out) {
        Gate::Read hold(gate);
        index.ranges(tokens_hashes, count, tier, out);
    }
    uint32_t tiers() {
        Gate::Read hold(gate);
        return index.tiers();
    }
    void dump(Dump *out, bool all_tiers) {
        Gate::Read hold(gate);
        index.dump(out, all_tiers);
    }
    std::string complaint() {
        Gate::Read hold(gate);
        return index.complaint();
    }
};

// What the one writer of a slot does, in bites.
class Writer {
public:
    explicit Writer(SharedIndex &shared) : index_(shared.index), gate_(shared.gate) {}

    // As Index::store; a refused event changes nothing.
    Stored store(uint32_t slot, bool has_parent, uint64_t parent_hash, const uint8_t *block_hashes,
                 const uint8_t *tokens_hashes, size_t count) {
        open(slot);
        uint32_t node = ROOT;
        {
            Gate::Bite hold(gate_);
            Stored outcome = index_.begin(slot, has_parent, parent_hash, block_hashes, count, &node);
            if (outcome != Stored::OK) return outcome;
        }
        for (size_t at = 0; at < count; at += BITE) {
            size_t part = std::min(BITE, count - at);
            grow(slot, part);
            Gate::Bite hold(gate_);
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
        for (size_t at = 0; at < count; at += BITE) {
            Gate::Bite hold(gate_);
            unknown += index_.remove(slot, block_hashes + 8 * at, std::min(BITE, count - at));
        }
        return unknown;
    }

    // As Index::adopt.
    size_t adopt(uint32_t slot, const uint8_t *block_hashes, size_t count) {
        open(slot);
        size_t unknown = 0;
        for (size_t at = 0; at < count; at += BITE) {
            size_t part = std::min(BITE, count - at);
            grow(slot, part);
            Gate::Bite hold(gate_);
            unknown += index_.adopt(slot, block_hashes + 8 * at, part);
        }
        return unknown;
    }

    void clear(uint32_t slot) {
        open(slot);
        uint64_t from = 0;
        for (bool more = true; more;) {
            Gate::Bite hold(gate_);
            more = index_.clear_some(slot, &from, BITE);
        }
    }

    void clear_all(uint32_t number) {
        for (uint32_t tier = 0; tier < TIERS; tier++)
            if (is_open(tier << TIER_SHIFT | number)) clear(tier << TIER_SHIFT | number);
    }

private:
    static constexpr size_t BITE = 64;

    bool is_open(uint32_t slot) {
        Gate::Bite hold(gate_);
        return index_.is_open(slot);
    }

    void open(uint32_t slot) {
        if (tier_of(slot) == 0 || is_open(slot)) return;
        Gate::Change hold(gate_);
        index_.open_slot(slot);
    }

    // Nobody else changes this slot, so the room is still there afterwards.
    void grow(uint32_t slot, size_t count) {
        {
            Gate::Bite hold(gate_);
            if (index_.has_room(slot, count)) return;
        }
        std::lock_guard<std::mutex> others(gate_.tables());
        Index::Held table = index_.grown(slot, count);
        Gate::Bite hold(gate_);
        index_.exchange(slot, &table);
    }

    Index &index_;
    Gate &gate_;
};

}  // namespace dynamo::radix
