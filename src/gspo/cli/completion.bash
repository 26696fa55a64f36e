_gspo() {
  local cur="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words="" options="" keys=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=( $(compgen -W '@VERBS@ --help --version' -- "$cur") ); return
  fi
  case "${COMP_WORDS[1]} $previous" in
@VALUES@
  esac
  case "${COMP_WORDS[1]}" in
@WORDS@
  esac
  case "$cur" in
    -*) COMPREPLY=( $(compgen -W "$options" -- "$cur") ); return ;;
  esac
  COMPREPLY=( $(compgen -W "$words" -- "$cur") )
  if [ "$keys" = 1 ] && [ "$COMP_CWORD" -gt 1 ] && [ -n "$cur" ] && [ "${#COMPREPLY[@]}" -eq 0 ]; then
    COMPREPLY=( $(compgen -W '@KEYS@' -- "$cur") )
    [ "${#COMPREPLY[@]}" -eq 0 ] || compopt -o nospace 2>/dev/null
  fi
}
complete -o default -o bashdefault -F _gspo gspo
