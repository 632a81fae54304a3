# Compares two versions such as v1.10.2 and 1.9: prints <, = or >.
a=$1 b=$2
[ "$a" = "$b" ] && { echo '='; exit; }
[ "$(printf '%s\n' "$a" "$b" | sort | head -n1)" = "$a" ] && echo '<' || echo '>'
