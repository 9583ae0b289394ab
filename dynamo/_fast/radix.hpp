// The prefix index: which slots hold which leading blocks. See docs/radix.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ordered_table.hpp"
#include "radix_holders.hpp"
#include "radix_nodes.hpp"

namespace dynamo::radix {

enum class Stored { OK, NO_PARENT, OWN_PARENT };

// Where a block lies: 0 device, 1 host, 2 disk, 3 external. A slot names its tier in its top bits, so
// the groups of 64 slots of a lower tier come after all groups of the device.
inline constexpr uint32_t TIERS = 4;
inline constexpr uint32_t TIER_SHIFT = 28;
inline constexpr uint32_t FIRST_LOWER_GROUP = (1u << TIER_SHIFT) / SLOTS_PER_WORD;

inline uint32_t tier_of(uint32_t slot) noexcept { return slot >> TIER_SHIFT; }
inline uint32_t number_of(uint32_t slot) noexcept { return slot & ((1u << TIER_SHIFT) - 1); }

inline uint64_t load64(const uint8_t *column, size_t index) noexcept {
    uint64_t value;
    std::memcpy(&value, column + 8 * index, sizeof value);
    return value;
}

// A chain to store again: parents come before children, so that a replay finds them.
struct Run {
    uint32_t slot;
    bool has_parent;
    uint64_t parent_hash;
    size_t begin, end;  // into the columns of the Dump
};

struct Dump {
    std::vector<Run> runs;
    std::vector<uint64_t> block_hashes, tokens_hashes;
};

class Index {
public:
    Index() : multiplier_(process_multiplier()), inverse_(inverse_of(multiplier_)) {}

    void set_cap(size_t blocks) noexcept { cap_ = std::min(blocks, MAX_BLOCKS); }
    size_t blocks() const noexcept { return blocks_; }
    size_t nodes() const noexcept { return nodes_.size(); }
    size_t dropped() const noexcept { return dropped_; }

    size_t memory_bytes() const noexcept {
        size_t bytes = nodes_.memory_bytes() + holders_.memory_bytes() + aliases_.memory_bytes() +
                       active_.capacity() * sizeof(Active) + joiners_.capacity() * sizeof(Joiner) +
                       joined_.capacity() * sizeof(uint64_t);
        for (const auto &tier : held_) {
            bytes += tier.capacity() * sizeof(Held);
            for (const Held &held : tier) bytes += held.memory_bytes();
        }
        return bytes;
    }

    // How many hashes the slot holds.
    size_t held(uint32_t slot) const noexcept {
        return is_open(slot) ? held_of(slot).size() : 0;
    }

    bool is_open(uint32_t slot) const noexcept {
        return tier_of(slot) < TIERS && number_of(slot) < held_[tier_of(slot)].size();
    }

    void open_slot(uint32_t slot) {
        auto &tier = held_[tier_of(slot)];
        if (number_of(slot) >= tier.size()) tier.resize(number_of(slot) + 1);
        active_.reserve(held_[0].size() / SLOTS_PER_WORD + 1);
        lower_ = lower_ || tier_of(slot) != 0;
    }

    // Adds the chain under `parent_hash` (none: the root) for `slot`; `*added` counts the hashes
    // that the slot did not have. An event that is refused changes nothing. O(count).
    Stored store(uint32_t slot, bool has_parent, uint64_t parent_hash, const uint8_t *block_hashes,
                 const uint8_t *tokens_hashes, size_t count, size_t *added) {
        uint32_t node = ROOT;
        Stored outcome = begin(slot, has_parent, parent_hash, block_hashes, count, &node);
        size_t before = blocks_;
        if (outcome == Stored::OK) store_part(slot, &node, block_hashes, tokens_hashes, count);
        *added = blocks_ - before;
        return outcome;
    }

    // Whether the chain can be stored, and the node that it hangs under.
    Stored begin(uint32_t slot, bool has_parent, uint64_t parent_hash, const uint8_t *block_hashes,
                 size_t count, uint32_t *node) const noexcept {
        *node = ROOT;
        if (has_parent) {
            *node = find_block(slot, mix(parent_hash));
            if (*node == NO_NODE) return Stored::NO_PARENT;
        }
        return names_its_own_parent(has_parent, parent_hash, block_hashes, count)
                   ? Stored::OWN_PARENT
                   : Stored::OK;
    }

    // Stores the chain under `*node`, which becomes its last; false if the cap refused the rest.
    bool store_part(uint32_t slot, uint32_t *node, const uint8_t *block_hashes,
                    const uint8_t *tokens_hashes, size_t count) {
        Held &held = held_of(slot);
        for (size_t i = 0; i < std::min(count, AHEAD); i++)
            held.prefetch(mix(load64(block_hashes, i)));
        for (size_t i = 0; i < count; i++) {
            if (i + AHEAD < count) held.prefetch(mix(load64(block_hashes, i + AHEAD)));
            uint64_t key = mix(load64(block_hashes, i));
            uint32_t next = store_one(held, slot, *node, key, load64(tokens_hashes, i));
            if (next == NO_NODE) {
                drop(count - i);
                return false;
            }
            *node = next;
        }
        return true;
    }

    // Holds in `slot` what other tiers of its owner hold under these ids; returns how many ids are
    // not known there. Amortised O(count).
    size_t adopt(uint32_t slot, const uint8_t *block_hashes, size_t count) {
        Held &held = held_of(slot);
        size_t unknown = 0;
        for (size_t i = 0; i < count; i++) {
            uint64_t key = mix(load64(block_hashes, i));
            uint32_t node = find_block(slot, key);
            if (node == NO_NODE) {
                unknown++;
            } else if (store_one(held, slot, nodes_[node].parent, key, nodes_[node].tokens_hash) ==
                       NO_NODE) {
                drop(count - i);
                break;
            }
        }
        return unknown;
    }

    // Counts blocks that the cap refused.
    void drop(size_t count) noexcept { dropped_ += count; }

    // Takes the hashes from `slot`; returns how many it did not have. Amortised O(count).
    size_t remove(uint32_t slot, const uint8_t *block_hashes, size_t count) noexcept {
        Held &held = held_of(slot);
        size_t unknown = 0;
        for (size_t i = 0; i < std::min(count, AHEAD); i++)
            held.prefetch(mix(load64(block_hashes, i)));
        for (size_t i = 0; i < count; i++) {
            if (i + AHEAD < count) held.prefetch(mix(load64(block_hashes, i + AHEAD)));
            auto *entry = held.find(mix(load64(block_hashes, i)));
            if (entry == nullptr) {
                unknown++;
                continue;
            }
            uint32_t node = entry->value;
            held.erase(entry);
            blocks_--;
            release(slot, node);
        }
        return unknown;
    }

    // Takes everything from `slot`; returns how many hashes that were. O(what it held).
    size_t clear(uint32_t slot) noexcept {
        Held held;
        held.swap(held_of(slot));
        size_t count = held.size();
        for (const auto &entry : held)
            if (entry.value != 0) release(slot, entry.value);
        blocks_ -= count;
        return count;
    }

    // The same, `limit` at a time: takes the hashes from `*from` on, in the table's order, and says
    // whether there are more. `*from` begins at 0.
    bool clear_some(uint32_t slot, uint64_t *from, size_t limit) noexcept {
        Held &held = held_of(slot);
        auto *at = held.seek(*from);
        for (size_t taken = 0; held.size() != 0; taken++) {
            if (taken == limit) return true;
            while (at != held.end() && at->value == 0) at++;
            if (at == held.end()) return *from = 0, true;  // moved to the front by a shrinking table
            *from = at->key;
            uint32_t node = at->value;
            const auto *table = held.begin();
            held.erase(at);
            blocks_--;
            release(slot, node);
            if (held.begin() != table) at = held.seek(*from);
        }
        return false;
    }

    // For a slot's table that grows aside: whether `count` more hashes fit, a copy in which they do,
    // and putting the copy in its place (`*table` is the old one then).
    using Held = OrderedTable<uint64_t>;

    bool has_room(uint32_t slot, size_t count) const noexcept {
        return held_of(slot).has_room(count);
    }
    Held grown(uint32_t slot, size_t count) const { return held_of(slot).grown(count); }
    void exchange(uint32_t slot, Held *table) noexcept { held_of(slot).swap(*table); }

    // The same for every tier of `number`.
    size_t clear_all(uint32_t number) noexcept {
        size_t count = 0;
        for (uint32_t tier = 0; tier < TIERS; tier++)
            if (is_open(tier << TIER_SHIFT | number)) count += clear(tier << TIER_SHIFT | number);
        return count;
    }

    // Writes, per device slot, how many leading blocks of the sequence it holds; `depths` has a place
    // for every slot and arrives as zeros. Returns how many slots hold at least one.
    // O(depth + slots), plus O(holders / 64) per level where more than 64 slots share blocks.
    size_t match(const uint8_t *tokens_hashes, size_t count, uint32_t *depths, bool early_exit) {
        active_.clear();
        uint32_t node = count ? nodes_.find_child(ROOT, load64(tokens_hashes, 0)) : NO_NODE;
        if (node == NO_NODE) return 0;
        size_t left = 0;
        Holders::Reader(holders_, nodes_[node]).each([&](const Word &word) {
            if (word.group >= FIRST_LOWER_GROUP) return;
            active_.push_back(Active{word.mask, word.group});
            left += static_cast<size_t>(__builtin_popcountll(word.mask));
        });
        const size_t matched = left;
        uint32_t depth = 1;
        for (; depth < count && !active_.empty(); depth++) {
            if (early_exit && left <= 1) break;
            node = nodes_.find_child(node, load64(tokens_hashes, depth));
            if (node == NO_NODE) break;
            if (!all_hold(nodes_[node])) left -= narrow_active(node, depth, depths);
        }
        for (const Active &active : active_) write_depth(active.group, active.mask, depth, depths);
        return matched;
    }

    // Writes, per slot number, how many blocks behind the first `depths[number]` it holds without a
    // hole in `tier`; `extensions` arrives as zeros. Returns for how many slots that is any.
    // O(depth + slots), and at once if the tier was never used.
    size_t extend(const uint8_t *tokens_hashes, size_t count, const uint32_t *depths,
                  uint32_t *extensions, uint32_t tier);

    // Where in the sequence, begins and ends in turn, there are blocks that any slot of `tier` holds.
    // O(depth), times holders/64 where many slots share blocks.
    void ranges(const uint8_t *tokens_hashes, size_t count, uint32_t tier,
                std::vector<uint32_t> *out) const;

    // A bit for each lower tier that was ever used.
    uint32_t tiers() const noexcept {
        uint32_t used = 0;
        for (uint32_t tier = 1; lower_ && tier < TIERS; tier++)
            used |= uint32_t{!held_[tier].empty()} << tier;
        return used;
    }

    // The device's blocks, or those of all tiers.
    void dump(Dump *out, bool all_tiers) const;
    std::string complaint() const;

private:
    static constexpr size_t AHEAD = 8;  // table places fetched before they are needed
    static constexpr size_t MAX_BLOCKS = 0xFFFFFF00u;

    // Slots of one group that have held every block so far.
    struct Active {
        uint64_t mask;
        uint32_t group;
    };

    // Slots of a lower tier whose depth is where their extension may begin.
    struct Joiner {
        uint32_t depth, number;
    };

    Held &held_of(uint32_t slot) noexcept { return held_[tier_of(slot)][number_of(slot)]; }
    const Held &held_of(uint32_t slot) const noexcept {
        return held_[tier_of(slot)][number_of(slot)];
    }

    // The node of a block id in the slot, else in another tier of the same owner.
    uint32_t find_block(uint32_t slot, uint64_t key) const noexcept {
        const auto *entry = held_of(slot).find(key);
        if (entry != nullptr) return entry->value;
        for (uint32_t tier = 0; lower_ && tier < TIERS; tier++) {
            uint32_t other = tier << TIER_SHIFT | number_of(slot);
            entry = is_open(other) ? held_of(other).find(key) : nullptr;
            if (entry != nullptr) return entry->value;
        }
        return NO_NODE;
    }

    // A bijection, so that the table can keep the mixed hash alone: external ids may be anything,
    // also 0, 1, 2, ...
    uint64_t mix(uint64_t hash) const noexcept { return (hash ^ hash >> 32) * multiplier_; }

    uint64_t unmix(uint64_t mixed) const noexcept {
        uint64_t hash = mixed * inverse_;
        return hash ^ hash >> 32;
    }

    static uint64_t inverse_of(uint64_t odd) noexcept {
        uint64_t inverse = odd;  // right in 3 bits; every step doubles them
        for (int bits = 3; bits < 64; bits *= 2) inverse *= 2 - odd * inverse;
        return inverse;
    }

    uint64_t alias_key(uint32_t slot, uint32_t node) const noexcept {
        return mix(uint64_t{slot} << 32 | node);
    }

    static bool names_its_own_parent(bool has_parent, uint64_t parent_hash,
                                     const uint8_t *block_hashes, size_t count) noexcept {
        for (size_t i = 0; i < count; i++) {
            uint64_t hash = load64(block_hashes, i);
            if (has_parent && hash == parent_hash) return true;
            parent_hash = hash;
            has_parent = true;
        }
        return false;
    }

    // Returns the block's node, or NO_NODE above the cap.
    uint32_t store_one(Held &held, uint32_t slot, uint32_t parent, uint64_t key,
                       uint64_t tokens_hash) {
        held.make_room();
        auto *entry = held.seek(key);
        bool is_new = !held.is_at(entry, key);
        uint32_t node = nodes_.find_child(parent, tokens_hash);
        if (!is_new && entry->value == node) return node;
        if ((is_new && blocks_ >= cap_) || (node == NO_NODE && nodes_.size() >= cap_))
            return NO_NODE;
        nodes_.make_room();
        holders_.make_room();
        aliases_.make_room();
        if (node == NO_NODE) node = nodes_.create(parent, tokens_hash);
        if (holders_.holds(nodes_[node], slot)) {
            add_alias(slot, node);
        } else {
            holders_.hold(nodes_[node], slot);
        }
        if (is_new) {
            held.insert(entry, key, node);
            blocks_++;
        } else {
            // The id names another block now. The new place is held before the old one is given
            // up, because giving up may prune nodes on the way to the new place.
            uint32_t old = entry->value;
            entry->value = node;
            release(slot, old);
        }
        return node;
    }

    // One external id of `slot` no longer names `node`.
    void release(uint32_t slot, uint32_t node) noexcept {
        if (aliases_.size() != 0 && drop_alias(slot, node)) return;
        holders_.drop(nodes_[node], slot);
        nodes_.prune(node);
        if (nodes_.size() == 0) holders_.reset();
    }

    // Counts the external ids by which a slot holds a node, beyond the first.
    void add_alias(uint32_t slot, uint32_t node) noexcept {
        uint64_t key = alias_key(slot, node);
        if (auto *entry = aliases_.find(key)) {
            entry->value++;
        } else {
            aliases_.insert(aliases_.seek(key), key, 1);
        }
    }

    bool drop_alias(uint32_t slot, uint32_t node) noexcept {
        auto *entry = aliases_.find(alias_key(slot, node));
        if (entry == nullptr) return false;
        if (--entry->value == 0) aliases_.erase(entry);
        return true;
    }

    static void write_depth(uint32_t group, uint64_t mask, uint32_t depth, uint32_t *depths) {
        for (; mask != 0; mask &= mask - 1)
            depths[group * SLOTS_PER_WORD + static_cast<uint32_t>(__builtin_ctzll(mask))] = depth;
    }

    // The usual step of a match: every active slot, all of one group, holds the node as well.
    bool all_hold(const Node &node) const noexcept {
        const Active &first = active_.front();
        return active_.size() == 1 && node.where == first.group && (first.mask & ~node.mask) == 0;
    }

    // Keeps of the active slots those that hold `node`, and writes `depth` for the others; returns
    // how many those are.
    size_t narrow_active(uint32_t node, uint32_t depth, uint32_t *depths) noexcept {
        Holders::Reader holders(holders_, nodes_[node]);
        size_t kept = 0, gone = 0;
        for (Active active : active_) {
            uint64_t leaving = active.mask & ~holders.mask(active.group);
            if (leaving != 0) {
                write_depth(active.group, leaving, depth, depths);
                gone += static_cast<size_t>(__builtin_popcountll(leaving));
                active.mask &= ~leaving;
            }
            if (active.mask != 0) active_[kept++] = active;
        }
        active_.resize(kept);
        return gone;
    }

    uint64_t multiplier_, inverse_;
    Nodes nodes_;
    Holders holders_;
    std::array<std::vector<Held>, TIERS> held_;  // per slot: mixed external hash -> node
    OrderedTable<uint64_t> aliases_;   // (slot, node) -> external ids beyond the first
    std::vector<Active> active_;       // scratch of match()
    std::vector<Joiner> joiners_;      // scratch of extend()
    std::vector<uint64_t> joined_;     // the same
    bool lower_ = false;               // whether a tier below the device was ever used
    size_t blocks_ = 0;
    size_t dropped_ = 0;
    size_t cap_ = MAX_BLOCKS;

    friend class Auditor;
    friend class Dumper;
};

}  // namespace dynamo::radix

#include "radix_audit.hpp"
#include "radix_dump.hpp"
#include "radix_extend.hpp"
