local _, path = unpack(ARGV)
local there = look(path)
return there
