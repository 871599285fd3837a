-- Puts a short value.
local _, path, when, wanted, etag, mark, crc, words, value = unpack(ARGV)
local no = refusal(path, when, wanted, etag)
if no then return no end
redis.call('SET', P .. path, value)
keep(path, etag, mark, crc, words)
return 'ok'
