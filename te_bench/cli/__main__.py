from te_bench.cli import main

if __name__ == "__main__":  # the fork server imports this file before it forks
    main()
