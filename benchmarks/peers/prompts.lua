-- wrk script: exactly `total` chat requests with prompts drawn from a list of words.
--   wrk … -s prompts.lua URL -- words.txt words max_tokens stream repeated first total
-- The same arguments give the same requests. Frequent words come first in the file and are drawn
-- more often. After `total` requests no connection sends more; after as many responses the script
-- says so, and an interrupt ends the run: nothing is cut off half-way.

local POOL, NEVER_MS = 16, 1000000000

local words, pool = {}, {}
local head, tail, prompt_words, repeated, first, total
local allowed, sent, answered = 0, 0, 0

local function prompt(id)
  local text = { "Note " .. id .. ":" }
  for i = 1, prompt_words do
    local skewed = math.random() ^ 2
    text[i + 1] = words[math.floor(skewed * #words) + 1]
  end
  return table.concat(text, " ")
end

local function message(id)
  return wrk.format(nil, nil, nil, head .. prompt(id) .. tail)
end

function init(args)
  for word in io.lines(args[1]) do words[#words + 1] = word end
  prompt_words, repeated = tonumber(args[2]), args[5] == "1"
  first, total = tonumber(args[6]), tonumber(args[7])
  wrk.method = "POST"
  wrk.path = "/v1/chat/completions"
  wrk.headers["content-type"] = "application/json"
  head = '{"model":"m","messages":[{"role":"user","content":"'
  tail = string.format('"}],"max_tokens":%s,"stream":%s,"ignore_eos":true}',
    args[3], args[4] == "1" and "true" or "false")
  math.randomseed(repeated and 1 or first + 1)
  if repeated then
    for id = 1, POOL do pool[id] = message(id) end
  end
end

function delay() -- asked once before each request
  allowed = allowed + 1
  return allowed <= total and 0 or NEVER_MS
end

function request()
  sent = sent + 1
  if repeated then return pool[sent % POOL + 1] end
  return message(first + sent)
end

function response()
  answered = answered + 1
  if answered == total then
    io.write("finished\n")
    io.flush()
  end
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    'result {"requests": %d, "failed": %d, "wall_s": %.6f, "received_bytes": %d, '
      .. '"p50_ms": %.3f, "p99_ms": %.3f, "max_ms": %.3f}\n',
    summary.requests, errors.status + errors.connect + errors.read + errors.write + errors.timeout,
    summary.duration / 1e6, summary.bytes,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
end
