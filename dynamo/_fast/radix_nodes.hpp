// The nodes of the prefix index: one per distinct token prefix that some slot holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "ordered_table.hpp"
#include "radix_holders.hpp"

namespace dynamo::radix {

inline constexpr uint32_t FREE = 0xFFFFFFFFu;  // in `parent`: the node is in the free list

// An odd multiplier that differs per process: clients choose tokens, and with a known one could
// choose them so that all their blocks share one home in a table.
inline uint64_t process_multiplier() {
    static const uint64_t multiplier = [] {
        std::random_device device;
        return (uint64_t{device()} << 32 | device()) | 1;
    }();
    return multiplier;
}

class Nodes {
public:
    Nodes() : multiplier_(process_multiplier()) { start(); }

    Node &operator[](uint32_t node) noexcept { return chunks_[node / CHUNK][node % CHUNK]; }
    const Node &operator[](uint32_t node) const noexcept {
        return chunks_[node / CHUNK][node % CHUNK];
    }

    // Nodes besides the root.
    size_t size() const noexcept { return live_; }
    uint32_t end() const noexcept { return fresh_; }

    size_t memory_bytes() const noexcept {
        return chunks_.size() * CHUNK * sizeof(Node) +
               chunks_.capacity() * sizeof(std::unique_ptr<Node[]>) + siblings_.memory_bytes();
    }

    uint32_t find_child(uint32_t parent, uint64_t tokens_hash) const noexcept {
        const Node &node = (*this)[parent];
        if (node.child != NO_NODE && (*this)[node.child].tokens_hash == tokens_hash)
            return node.child;
        return node.others == 0 ? NO_NODE : find_sibling(parent, tokens_hash);
    }

    // Makes sure that the next create() succeeds. Throws std::bad_alloc otherwise.
    void make_room() {
        siblings_.make_room();
        if (free_ == NO_NODE && fresh_ == chunks_.size() * CHUNK)
            chunks_.push_back(std::make_unique<Node[]>(CHUNK));
    }

    // A new child without holders. Room must have been made.
    uint32_t create(uint32_t parent, uint64_t tokens_hash) noexcept {
        uint32_t child = take();
        Node &node = (*this)[child];
        node = Node{};
        node.tokens_hash = tokens_hash;
        node.parent = parent;
        Node &above = (*this)[parent];
        if (above.child == NO_NODE) {
            above.child = child;
        } else {
            uint32_t key = tag(parent, tokens_hash);
            siblings_.insert(siblings_.seek(key), key, child);
            above.others++;
        }
        return child;
    }

    // Frees the node, then its ancestors as long as they have neither holders nor children.
    void prune(uint32_t node) noexcept {
        while (node != ROOT && is_idle((*this)[node])) {
            uint32_t parent = (*this)[node].parent;
            unlink(node);
            give_back(node);
            node = parent;
        }
        if (live_ == 0) start();
    }

    using Siblings = OrderedTable<uint32_t, 4>;

    const Siblings &siblings() const noexcept { return siblings_; }

private:
    static constexpr uint32_t CHUNK = 4096;

    static bool is_idle(const Node &node) noexcept {
        return Holders::is_empty(node) && node.child == NO_NODE && node.others == 0;
    }

    // An empty tree owns one chunk and nothing else.
    void start() {
        chunks_.resize(chunks_.empty() ? 0 : 1);
        if (chunks_.empty()) chunks_.push_back(std::make_unique<Node[]>(CHUNK));
        chunks_.shrink_to_fit();
        chunks_[0][ROOT] = Node{};
        fresh_ = 1;
        free_ = NO_NODE;
        siblings_.reset();
    }

    uint32_t tag(uint32_t parent, uint64_t tokens_hash) const noexcept {
        uint64_t mixed = (tokens_hash ^ tokens_hash >> 32) + uint64_t{parent} * 0x9E3779B97F4A7C15u;
        return static_cast<uint32_t>((mixed * multiplier_) >> 32);
    }

    uint32_t find_sibling(uint32_t parent, uint64_t tokens_hash) const noexcept {
        uint32_t wanted = tag(parent, tokens_hash);
        const auto *at = siblings_.seek(wanted);
        for (; at != nullptr && at->value != 0 && at->key == wanted; at++) {
            const Node &node = (*this)[at->value];
            if (node.parent == parent && node.tokens_hash == tokens_hash) return at->value;
        }
        return NO_NODE;
    }

    void unlink(uint32_t child) noexcept {
        const Node &node = (*this)[child];
        Node &above = (*this)[node.parent];
        if (above.child == child) {
            above.child = NO_NODE;
            return;
        }
        auto *at = siblings_.seek(tag(node.parent, node.tokens_hash));
        while (at->value != child) at++;
        siblings_.erase(at);
        above.others--;
    }

    uint32_t take() noexcept {
        live_++;
        if (free_ == NO_NODE) return fresh_++;
        uint32_t node = free_;
        free_ = (*this)[node].child;
        return node;
    }

    void give_back(uint32_t node) noexcept {
        (*this)[node].parent = FREE;
        (*this)[node].child = free_;
        free_ = node;
        live_--;
    }

    uint64_t multiplier_;
    std::vector<std::unique_ptr<Node[]>> chunks_;
    uint32_t fresh_ = 1;      // nodes from here on have never been used
    uint32_t free_ = NO_NODE;  // head of the free list
    size_t live_ = 0;
    Siblings siblings_;  // tag(parent, tokens hash) -> child that is not inline
};

}  // namespace dynamo::radix
