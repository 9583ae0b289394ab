// Writing the index down as chains whose replay gives the same matches. Included by radix.hpp.
#pragma once

namespace dynamo::radix {

// Works slot by slot, all tiers of a slot at once: a block may hang under one of another tier. Only
// what hangs together from the root is written: a block behind a hole cannot be replayed (its parent
// has no name on that slot) and counts in no match either.
class Dumper {
public:
    Dumper(const Index &index, Dump *out, uint32_t tiers)
        : index_(index), out_(*out), tiers_(tiers), position_(index.nodes_.end(), NONE) {}

    void write_slot(uint32_t number) {
        collect(number);
        link();
        for (uint32_t first = roots_; first != NONE; first = blocks_[first].sibling)
            pending_.push_back({first, NONE});
        while (!pending_.empty()) {
            auto [block, parent] = pending_.back();
            pending_.pop_back();
            write_path(block, parent);
        }
        for (const Block &block : blocks_) position_[block.node] = NONE;
    }

private:
    static constexpr uint32_t NONE = 0xFFFFFFFFu;
    static constexpr size_t NO_PART = static_cast<size_t>(-1);

    struct Block {
        uint32_t node;
        uint32_t slot;
        uint64_t hash;
        uint32_t child = NONE;    // first block below it
        uint32_t sibling = NONE;  // next block below the same parent
        uint32_t alias = NONE;    // next block that names the same node
    };

    void collect(uint32_t number) {
        blocks_.clear();
        roots_ = NONE;
        for (uint32_t tier = 0; tier < tiers_; tier++) {
            uint32_t slot = tier << TIER_SHIFT | number;
            if (!index_.is_open(slot)) continue;
            for (const auto &entry : index_.held_of(slot))
                if (entry.value != 0) add(Block{entry.value, slot, index_.unmix(entry.key)});
        }
    }

    void add(const Block &block) {
        uint32_t here = static_cast<uint32_t>(blocks_.size());
        blocks_.push_back(block);
        uint32_t first = position_[block.node];
        if (first == NONE) {
            position_[block.node] = here;
        } else {
            blocks_[here].alias = blocks_[first].alias;
            blocks_[first].alias = here;
        }
    }

    void link() {
        for (uint32_t here = 0; here < blocks_.size(); here++) {
            Block &block = blocks_[here];
            if (position_[block.node] != here) continue;  // an alias hangs on the first name
            uint32_t parent = index_.nodes_[block.node].parent;
            uint32_t *list = parent == ROOT ? &roots_ : nullptr;
            if (parent != ROOT && position_[parent] != NONE)
                list = &blocks_[position_[parent]].child;
            if (list == nullptr) continue;
            block.sibling = *list;
            *list = here;
        }
    }

    // A block and, as long as there is one, its first child; the other children wait their turn.
    void write_path(uint32_t block, uint32_t parent) {
        path_.clear();
        above_ = parent;
        for (uint32_t here = block; here != NONE; here = blocks_[here].child) {
            path_.push_back(here);
            uint32_t child = blocks_[here].child;
            if (child != NONE)
                for (uint32_t more = blocks_[child].sibling; more != NONE;
                     more = blocks_[more].sibling)
                    pending_.push_back({more, here});
        }
        cut();
        for (const Part &part : parts_) write_part(part);
        for (size_t at = 0; at < path_.size(); at++) write_second_names(at);
    }

    // The path in parts that lie in one tier each, in order of their first block, so that whatever a
    // part hangs under is written before it.
    void cut() {
        parts_.clear();
        std::array<size_t, TIERS> open;  // per tier: the part that may go on
        open.fill(NO_PART);
        for (size_t at = 0; at < path_.size(); at++)
            for (uint32_t tier = 0; tier < tiers_; tier++) {
                if (name(at, tier) == NONE) {
                    open[tier] = NO_PART;
                } else if (open[tier] == NO_PART) {
                    open[tier] = parts_.size();
                    parts_.push_back(Part{tier, at, at + 1});
                } else {
                    parts_[open[tier]].end = at + 1;
                }
            }
    }

    // The first block by which `tier` names the node at this place of the path.
    uint32_t name(size_t at, uint32_t tier) const {
        uint32_t block = path_[at];
        while (block != NONE && tier_of(blocks_[block].slot) != tier) block = blocks_[block].alias;
        return block;
    }

    struct Part {
        uint32_t tier;
        size_t begin, end;  // places of the path
    };

    void write_part(const Part &part) {
        Run run;
        if (!begin_run(name(part.begin, part.tier), part.begin, &run)) return;
        for (size_t at = part.begin; at < part.end; at++) write(name(at, part.tier));
        end_run(run);
    }

    void write_second_names(size_t at) {
        for (uint32_t block = path_[at]; block != NONE; block = blocks_[block].alias) {
            Run run;
            if (block == name(at, tier_of(blocks_[block].slot)) || !begin_run(block, at, &run)) continue;
            write(block);
            end_run(run);
        }
    }

    // False if no id of the parent means the parent in this tier: an id may name one block in one
    // tier and another block in another.
    bool begin_run(uint32_t block, size_t at, Run *run) const {
        uint32_t parent = at == 0 ? above_ : path_[at - 1];
        size_t begin = out_.block_hashes.size();
        *run = Run{blocks_[block].slot, parent != NONE, 0, begin, begin};
        for (uint32_t other = parent; other != NONE; other = blocks_[other].alias) {
            run->parent_hash = blocks_[other].hash;
            uint64_t key = index_.mix(run->parent_hash);
            if (tiers_ == 1 || index_.find_block(run->slot, key) == blocks_[other].node) return true;
        }
        return parent == NONE;
    }

    void end_run(Run run) {
        run.end = out_.block_hashes.size();
        out_.runs.push_back(run);
    }

    void write(uint32_t block) {
        out_.block_hashes.push_back(blocks_[block].hash);
        out_.tokens_hashes.push_back(index_.nodes_[blocks_[block].node].tokens_hash);
    }

    struct Step {
        uint32_t block, parent;
    };

    const Index &index_;
    Dump &out_;
    const uint32_t tiers_;
    std::vector<uint32_t> position_;  // node -> first of its blocks
    std::vector<Block> blocks_;
    std::vector<Step> pending_;
    std::vector<uint32_t> path_;
    std::vector<Part> parts_;
    uint32_t roots_ = NONE;
    uint32_t above_ = NONE;  // what the path hangs under
};

inline void Index::dump(Dump *out, bool all_tiers) const {
    Dumper dumper(*this, out, all_tiers ? TIERS : 1);
    for (uint32_t number = 0; number < held_[0].size(); number++) dumper.write_slot(number);
}

}  // namespace dynamo::radix
