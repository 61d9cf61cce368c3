from flashnorm.cli.main import main

main()
