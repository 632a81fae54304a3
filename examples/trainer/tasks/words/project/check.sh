# What the author tried. Prints how many of it work.
ok=0
[ "$(echo b a b | sh words.sh 1)" = "2 b" ] && ok=$((ok+1))
[ "$(echo The the | sh words.sh)" = "2 the" ] && ok=$((ok+1))
echo "$ok of 2"
