// Blocks per slot in the order in which they were last touched. See recency.pyi.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "ordered_table.hpp"

namespace dynamo {

// Blocks dropped together: all of one slot, deepest first.
struct Dropped {
    uint32_t slot;
    std::vector<uint64_t> blocks;
};

// A block is an entry of its slot's table and a node of one list, or pinned and in none. A list starts
// with the block that is dropped first. Slots share the common list; a slot that is given its own list
// uses it from then on: its blocks in the common list stay there until they are touched.
class Recency {
public:
    static constexpr uint32_t MAX_SLOTS = 65536;

    explicit Recency(uint64_t multiplier) : multiplier_(multiplier | 1), lists_(1) {}

    size_t blocks() const noexcept { return blocks_; }
    size_t leases() const noexcept { return leases_.size() - free_leases_.size(); }
    bool is_open(size_t slot) const noexcept { return slot < slots_.size() && slots_[slot].open; }
    size_t blocks_of(size_t slot) const noexcept { return slots_[slot].held.size(); }
    bool has_own_list(size_t slot) const noexcept { return slots_[slot].list != COMMON; }

    size_t memory_bytes() const noexcept {
        size_t bytes = chunks_.size() * CHUNK * sizeof(Node) + slots_.capacity() * sizeof(Slot) +
                       lists_.capacity() * sizeof(List) + leases_.capacity() * sizeof(Lease);
        for (const Slot &slot : slots_) bytes += slot.held.memory_bytes();
        for (const Lease &lease : leases_) bytes += lease.nodes.capacity() * sizeof(uint32_t);
        return bytes;
    }

    void open(uint32_t slot, bool own_list) {
        if (slot >= slots_.size()) {
            lists_.resize(slot + 2);
            slots_.resize(slot + 1);
        }
        slots_[slot].open = true;
        if (own_list) slots_[slot].list = slot + 1;
    }

    // Removes the slot with its leases; returns the number of its blocks. O(blocks + leases).
    size_t close(uint32_t slot) noexcept {
        for (uint32_t place = 0; place < leases_.size(); place++)
            if (leases_[place].live && leases_[place].slot == slot) end(place);
        Table held;
        held.swap(slots_[slot].held);
        for (const auto &entry : held) {
            if (entry.value == 0) continue;
            uint32_t node = entry.value;
            if (at(node).pins == 0) unlink(node);
            free_node(node);
        }
        slots_[slot].open = false;
        slots_[slot].list = COMMON;
        if (blocks_ == 0) reset();
        return held.size();
    }

    // Makes the chain the newest of its slot's list, its first block the very newest; pinned blocks
    // stay out of the list. Throws std::bad_alloc with the deeper part touched. O(count).
    void touch(uint32_t slot, const uint64_t *blocks, size_t count, double now_s) {
        each(slot, blocks, count, now_s, [this, slot](uint32_t node) {
            if (at(node).pins == 0) append(node, slots_[slot].list);
        });
    }

    // The same, and keeps the blocks until release() of the returned lease. O(count).
    uint64_t pin(uint32_t slot, const uint64_t *blocks, size_t count, double now_s) {
        if (free_leases_.empty()) make_leases();
        uint32_t place = free_leases_.back();
        Lease &lease = leases_[place];
        lease.nodes.reserve(count);
        free_leases_.pop_back();
        lease.slot = slot;
        lease.live = true;
        try {
            each(slot, blocks, count, now_s, [this, &lease](uint32_t node) {
                at(node).pins++;
                lease.nodes.push_back(node);
            });
        } catch (...) {
            drop_pins(lease, now_s);
            end(place);
            throw;
        }
        return uint64_t{lease.generation} << 32 | place;
    }

    // Ends a lease: blocks without another pin become the newest of their list. False if it has ended.
    bool release(uint64_t handle, double now_s) noexcept {
        uint32_t place = static_cast<uint32_t>(handle);
        if (place >= leases_.size() || !leases_[place].live ||
            leases_[place].generation != handle >> 32)
            return false;
        drop_pins(leases_[place], now_s);
        end(place);
        return true;
    }

    // Drops up to `limit` blocks of the common list that were not touched after `before_s`.
    size_t age(double before_s, size_t limit, std::vector<Dropped> *out) {
        return drop(COMMON, before_s, limit, out);
    }

    // Drops up to `limit` blocks of the slot's own list, the oldest first.
    size_t evict(uint32_t slot, size_t limit, std::vector<Dropped> *out) {
        return drop(slots_[slot].list, FOREVER_S, limit, out);
    }

    // Drops up to `limit` blocks over all lists, the oldest first; of one instant those of the common
    // list first, then of the lower slot. O(dropped + instants * slots).
    size_t prune(size_t limit, std::vector<Dropped> *out) {
        size_t dropped = 0;
        while (dropped < limit) {
            const Node *oldest = nullptr;
            uint32_t from = 0;
            for (uint32_t list = 0; list < lists_.size(); list++) {
                if (lists_[list].front == NONE) continue;
                const Node &front = at(lists_[list].front);
                if (oldest != nullptr && front.touched_s >= oldest->touched_s) continue;
                oldest = &front;
                from = list;
            }
            if (oldest == nullptr) break;
            dropped += drop(from, oldest->touched_s, limit - dropped, out);
        }
        return dropped;
    }

    // Returns a violated invariant, or null. O(blocks).
    const char *complaint() const {
        size_t linked = 0, held = 0, pinned = 0, pins = 0, leased = 0;
        for (uint32_t list = 0; list < lists_.size(); list++) {
            uint32_t before = NONE;
            for (uint32_t node = lists_[list].front; node != NONE; node = at(node).next) {
                if (at(node).pins != 0) return "a pinned block is in a list";
                if (at(node).list != list) return "a block is in a list that it does not name";
                if (at(node).previous != before) return "a list is broken";
                if (before != NONE && at(before).touched_s > at(node).touched_s)
                    return "a list is out of order";
                before = node;
                linked++;
            }
            if (lists_[list].back != before) return "a list does not end with its last block";
        }
        for (uint32_t slot = 0; slot < slots_.size(); slot++) {
            if (const char *wrong = slots_[slot].held.complaint()) return wrong;
            held += slots_[slot].held.size();
            for (const auto &entry : slots_[slot].held) {
                if (entry.value == 0) continue;
                if (at(entry.value).slot != slot || mix(at(entry.value).block) != entry.key)
                    return "a table's entry leads to another block";
                pinned += at(entry.value).pins != 0;
                pins += at(entry.value).pins;
            }
        }
        for (const Lease &lease : leases_) leased += lease.nodes.size();
        if (held != blocks_) return "the blocks held do not add up";
        if (linked + pinned != blocks_) return "a block is neither pinned nor in a list";
        return pins == leased ? nullptr : "pins and leases differ";
    }

private:
    using Table = OrderedTable<uint64_t>;

    static constexpr uint32_t NONE = 0;  // no node: node 0 is never used
    static constexpr uint32_t CHUNK = 1024;
    static constexpr uint32_t COMMON = 0;
    static constexpr size_t AHEAD = 8;  // blocks to prefetch: hides the cache miss of a table
    static constexpr double FOREVER_S = __builtin_huge_val();

    struct Node {
        uint64_t block = 0;
        double touched_s = 0;
        uint32_t previous = NONE, next = NONE;
        uint32_t slot = 0, list = COMMON;
        uint32_t pins = 0;
    };

    struct List {
        uint32_t front = NONE, back = NONE;
    };

    struct Slot {
        Table held;  // mixed block -> node
        uint32_t list = COMMON;
        bool open = false;
    };

    struct Lease {
        std::vector<uint32_t> nodes;
        uint32_t slot = 0, generation = 0;
        bool live = false;
    };

    Node &at(uint32_t node) noexcept { return chunks_[node / CHUNK][node % CHUNK]; }
    const Node &at(uint32_t node) const noexcept { return chunks_[node / CHUNK][node % CHUNK]; }

    // A bijection, so that two blocks of a table never share a key. The multiplier is random: callers
    // cannot choose colliding blocks.
    uint64_t mix(uint64_t block) const noexcept { return (block ^ block >> 32) * multiplier_; }

    // Calls `then` with the node of every block, deepest first, created or unlinked from its list.
    template <class Then>
    void each(uint32_t slot, const uint64_t *blocks, size_t count, double now_s, Then then) {
        Table &held = slots_[slot].held;
        for (size_t left = count; left > 0; left--) {
            if (left > AHEAD) held.prefetch(mix(blocks[left - 1 - AHEAD]));
            uint64_t key = mix(blocks[left - 1]);
            auto *found = held.find(key);
            uint32_t node;
            if (found != nullptr) {
                node = found->value;
                if (at(node).pins == 0) unlink(node);
            } else {
                node = create(slot, key, blocks[left - 1]);
            }
            at(node).touched_s = now_s;
            then(node);
        }
    }

    uint32_t create(uint32_t slot, uint64_t key, uint64_t block) {
        Table &held = slots_[slot].held;
        held.make_room();
        if (free_ == NONE && fresh_ >= chunks_.size() * CHUNK)
            chunks_.push_back(std::make_unique<Node[]>(CHUNK));
        uint32_t node = free_;
        if (node != NONE) free_ = at(node).next;
        else node = fresh_++;
        held.insert(held.seek(key), key, node);
        at(node) = Node{};
        at(node).block = block;
        at(node).slot = slot;
        blocks_++;
        return node;
    }

    void free_node(uint32_t node) noexcept {
        at(node).next = free_;
        free_ = node;
        blocks_--;
    }

    // Frees all chunks but the first; no block is held.
    void reset() noexcept {
        if (chunks_.size() > 1) {
            chunks_.resize(1);
            chunks_.shrink_to_fit();
        }
        fresh_ = 1;
        free_ = NONE;
    }

    void append(uint32_t node, uint32_t list) noexcept {
        Node &last = at(node);
        last.list = list;
        last.next = NONE;
        last.previous = lists_[list].back;
        (last.previous == NONE ? lists_[list].front : at(last.previous).next) = node;
        lists_[list].back = node;
    }

    void unlink(uint32_t node) noexcept {
        Node &dropped = at(node);
        (dropped.previous == NONE ? lists_[dropped.list].front : at(dropped.previous).next) = dropped.next;
        (dropped.next == NONE ? lists_[dropped.list].back : at(dropped.next).previous) = dropped.previous;
    }

    size_t drop(uint32_t list, double until_s, size_t limit, std::vector<Dropped> *out) {
        size_t dropped = 0;
        while (dropped < limit) {
            uint32_t node = lists_[list].front;
            if (node == NONE || at(node).touched_s > until_s) break;
            uint32_t slot = at(node).slot;
            if (out->empty() || out->back().slot != slot) out->push_back(Dropped{slot, {}});
            out->back().blocks.push_back(at(node).block);
            Table &held = slots_[slot].held;
            held.erase(held.find(mix(at(node).block)));
            unlink(node);
            free_node(node);
            dropped++;
        }
        if (blocks_ == 0) reset();
        return dropped;
    }

    // Doubles the leases; `free_leases_` has capacity for all of them, so that end() cannot fail.
    void make_leases() {
        size_t known = leases_.size(), wanted = known == 0 ? 16 : 2 * known;
        free_leases_.reserve(wanted);
        leases_.resize(wanted);
        for (size_t place = wanted; place > known; place--)
            free_leases_.push_back(static_cast<uint32_t>(place - 1));
    }

    void drop_pins(Lease &lease, double now_s) noexcept {
        for (uint32_t node : lease.nodes) {
            if (--at(node).pins > 0) continue;
            at(node).touched_s = now_s;
            append(node, slots_[lease.slot].list);
        }
        lease.nodes.clear();
    }

    void end(uint32_t place) noexcept {
        Lease &lease = leases_[place];
        lease.nodes.clear();
        lease.live = false;
        lease.generation++;
        free_leases_.push_back(place);
    }

    uint64_t multiplier_;
    std::vector<std::unique_ptr<Node[]>> chunks_;
    uint32_t fresh_ = 1;    // nodes from here on have never been used
    uint32_t free_ = NONE;  // head of the free list
    size_t blocks_ = 0;
    std::vector<Slot> slots_;
    std::vector<List> lists_;  // the common one, then by slot
    std::vector<Lease> leases_;
    std::vector<uint32_t> free_leases_;
};

}  // namespace dynamo
